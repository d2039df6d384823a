#include "column_decode.h"
#include "tile_product.h"

namespace exl3 {
namespace {

struct Decoder {
    template <int BITS2, int CODEBOOK>
    static constexpr Decode at() {
        return decode_columns<BITS2, CODEBOOK, 8>;
    }
};

}  // namespace

const Tier kTierAvx2 = make_tier<ColumnLayout<8>, Decoder, 6>();

}  // namespace exl3
