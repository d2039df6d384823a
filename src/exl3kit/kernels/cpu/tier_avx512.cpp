#include "column_decode.h"
#include "tile_product.h"

namespace exl3 {
namespace {

struct Decoder {
    template <int BITS2, int CODEBOOK>
    static constexpr Decode at() {
        return decode_columns<BITS2, CODEBOOK, 16>;
    }
};

}  // namespace

const Tier kTierAvx512 = make_tier<ColumnLayout<16>, Decoder, 12>();

}  // namespace exl3
