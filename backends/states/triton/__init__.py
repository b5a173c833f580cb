"""The state backend `triton`: one launch per layer for decode, and a chunked scan for prompts."""

from headway.kernels.runtime.triton_cache import use_kernel_cache

use_kernel_cache()
