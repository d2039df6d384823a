#include "column_decode.h"
#include "tile_product.h"

namespace exl3 {
namespace {

struct Decoder {
    template <int BITS2, int CODEBOOK>
    static constexpr Decode at() {
        return decode_columns<BITS2, CODEBOOK, 4>;
    }
};

}  // namespace

const Tier kTierPortable = make_tier<ColumnLayout<4>, Decoder, 4>();

}  // namespace exl3
