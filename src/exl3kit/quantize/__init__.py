"""Dense weights to EXL3: the quantiser of one tensor, and the job that quantises a checkpoint.

One tensor: `regularize` (signs, channel scales, Hadamard) makes its entries near Gaussian, `scale`
finds the one factor g that suits the codebook, `ldl` factors the Hessian, `ldlq` quantises blocks
of 16 rows from the last to the first with error feedback, `viterbi` chooses the states of each
tile, `refit` fits the two scale vectors to the chosen states; `tensor.quantize_tensor` is all of
it.

A checkpoint: `job` is the whole of it. `preflight` refuses what cannot work and plans the rest:
`contents` (every tensor of the output), `bit_plan`, `budget` and `recipe` (its bits), `layout`
(whole or in ranks), `memory`. `stages` takes the rows through the layers; `layer` and `experts`
quantise one, with Hessians from `hessian`, by `linears`, into a `store`, which is a `shard_file`
and the `journal`. `work_folder` holds what a stopped run needs to go on, `publish` ends the job,
with metadata from `output` and `ordinary`. `report` and `plot` show what was reached.
"""

from __future__ import annotations
