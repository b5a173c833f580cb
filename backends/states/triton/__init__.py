"""The state backend `triton`: one launch for the decode of a layer with a state, and a chunked scan for prompts."""

from headway.kernels.runtime.triton_cache import use_kernel_cache

use_kernel_cache()
