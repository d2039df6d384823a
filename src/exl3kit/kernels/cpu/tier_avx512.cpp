#include "column_decode.h"
#include "panel_product.h"

namespace exl3 {

const Tier kTierAvx512 = make_tier<ColumnLayout<16>, ColumnDecoder<16>, 12>();

}  // namespace exl3
