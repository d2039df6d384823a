#include "column_decode.h"
#include "panel_product.h"

namespace exl3 {

const Tier kTierPortable = make_tier<ColumnLayout<4>, ColumnDecoder<4>, 4>();

}  // namespace exl3
