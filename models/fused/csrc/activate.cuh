// What comes between the products of an MLP: ACTIVATION, by its number.
#pragma once

namespace fused {

__device__ __forceinline__ float activate(float x) {
#if ACTIVATION == 1  // SiLU
  return x / (1.0f + __expf(-x));
#elif ACTIVATION == 2  // GELU, exact
  return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
#elif ACTIVATION == 3  // GELU by tanh: (1 + tanh(u)) / 2 = sigmoid(2 u)
  return x / (1.0f + __expf(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
#elif ACTIVATION == 4  // ReLU
  return fmaxf(x, 0.0f);
#elif ACTIVATION == 5  // its square; a NaN stays one
  return x > 0.0f ? x * x : x == x ? 0.0f : x;
#elif ACTIVATION == 6  // x * sigmoid(ALPHA x)
  return x / (1.0f + __expf(-(ALPHA) * x));
#else
  return x;
#endif
}

}  // namespace fused
