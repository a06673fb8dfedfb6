"""llama.cpp's own quantizer: ``llama_cpp_quantize.py MODEL.gguf TYPE OUT.gguf [IMPORTANCE.npz]``.

IMPORTANCE holds, for each tensor of the file, the mean square of each input (float32 [in]): what ``llama-imatrix``
gathers.
"""

from __future__ import annotations

import ctypes
import sys

import llama_cpp
import numpy as np

source, kind, out, *importance = sys.argv[1:]
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}"), 2
if importance:
    read = np.load(importance[0])
    entries = (llama_cpp.llama_model_imatrix_data * (len(read.files) + 1))()  # the last, without a name, ends them
    kept = {name: np.ascontiguousarray(read[name], np.float32) for name in read.files}
    for entry, (name, values) in zip(entries, kept.items()):
        entry.name, entry.size = name.encode(), len(values)
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    params.imatrix = entries
assert llama_cpp.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(params)) == 0
