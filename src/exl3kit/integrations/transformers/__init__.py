"""EXL3 in transformers: importing this package registers the format, nothing else is needed.

    import exl3kit.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained("OUT")

    compat -> config -> linear | experts -> replace -> quantizer

Modules whose weights the checkpoint stores as EXL3 are replaced before loading by modules whose
buffers carry the checkpoint's own tensor names. transformers then loads and saves them like any
others: no weight conversion takes part, and the packed trellis is the only copy in memory.
Nothing of transformers is patched.
"""

from __future__ import annotations

import transformers

from exl3kit.integrations.transformers import compat
from exl3kit.integrations.transformers.config import METHOD, SHIM, Exl3Config
from exl3kit.integrations.transformers.quantizer import Exl3Quantizer

__all__ = ["Exl3Config", "Exl3Quantizer"]

compat.check_version(transformers.__version__)
for _method in (METHOD, SHIM):
    compat.register(_method, Exl3Config, Exl3Quantizer)
