"""Dense weights to EXL3: the quantiser of one tensor, and the job that quantises a checkpoint.

One tensor: `regularize` (signs, channel scales, Hadamard) makes its entries near Gaussian, `scale`
finds the one factor g that suits the codebook, `ldl` factors the Hessian, `ldlq` quantises blocks
of 16 rows from the last to the first with error feedback, `viterbi` chooses the states of each
tile, `refit` fits the two scale vectors to the chosen states; `tensor.quantize_tensor` is all of
it. A checkpoint: `job` walks the layers, with `calibration`, `hessian` and `experts`.
"""

from __future__ import annotations
