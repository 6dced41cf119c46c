// One quantised product by itself, for tests: a decoder of the library multiplies only whole
// layers.
#include "quantised.h"

// x [M, K] in fp32 -> y [M, 16 * blocks].
extern "C" __attribute__((visibility("default"))) void multiply(const Product* product,
                                                                const float* x, int64_t M,
                                                                int64_t threads, float* y) {
  const auto& weights = static_cast<const QuantisedProduct&>(*product);
  const int T = static_cast<int>(threads), stride = weights.blocks * kLanes;
  Buffer<RowBlock> blocks;
  const RowBlocks rows{blocks.reserve(M * (weights.K / kBlockInputs) + kAmxRows),
                       weights.K / kBlockInputs, static_cast<int>(M)};
  for (int m = 0; m < rows.M; ++m)
    quantise_row<Fp32>(x + static_cast<size_t>(m) * weights.K, rows, m);
  std::vector<float> sums(T * M * kPanelColumns);
  Pool::shared().run(T, [&](int t) {
    multiply_quantised(weights, nullptr, rows, t, T, sums.data() + t * M * kPanelColumns,
                       [&](const Panel& panel, const float* out) {
                         for (int m = 0; m < rows.M; ++m)
                           std::memcpy(y + m * stride + panel.first * kLanes,
                                       out + m * kPanelColumns,
                                       panel.width * kLanes * sizeof(float));
                       });
  });
}
