#include "column_decode.h"
#include "panel_product.h"

namespace exl3 {

const Tier kTierAvx2 = make_tier<ColumnLayout<8>, ColumnDecoder<8>, 6>();

}  // namespace exl3
