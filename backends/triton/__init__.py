"""The Triton backend: paged split-KV decode, varlen prefill and extend, and the cache writer, for every built-in layout."""

from headway.kernels.runtime.triton_cache import use_kernel_cache

use_kernel_cache()
