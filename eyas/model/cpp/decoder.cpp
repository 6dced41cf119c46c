// What Python calls: products, targets and drafts behind a C interface, in the structs of eyas.h.
#include "eyas.h"

#include "draft.h"
#include "target.h"

namespace {

// Calls are serialised: decoders share the pool, and a decoder its buffers.
std::mutex& calls() {
  static std::mutex mutex;
  return mutex;
}

// What a call returns, or a sign of failure: no exception crosses into Python. They are of memory,
// or of a thread that cannot be started.
template <class Make>
std::invoke_result_t<Make> created(Make&& make) {
  try {
    return make();
  } catch (...) {
    return nullptr;
  }
}

template <class Call>
int64_t guarded(Call&& call, int64_t failure = kNoMemory) {
  try {
    return call();
  } catch (...) {
    return failure;
  }
}

template <class Call>
int64_t locked(Call&& call, int64_t failure = kNoMemory) {
  const auto alone = [&] {
    const std::lock_guard<std::mutex> guard(calls());
    return call();
  };
  return guarded(alone, failure);
}

// A call that a decoder answers.
template <class Call>
int64_t answered(Decoder* decoder, int (Decoder::*answer)(const Call&), const Call* call,
                 int64_t failure = kNoMemory) {
  return locked([&] { return (decoder->*answer)(*call); }, failure);
}

std::vector<Source> sources(const Weights& weights) {
  std::vector<Source> found;
  for (int64_t i = 0; i < weights.count; ++i)
    found.push_back({weights.parts[i].data, static_cast<int>(weights.parts[i].rows)});
  return found;
}

template <class A>
Decoder* decoder_of(const DecoderParts& parts) {
  if (parts.shape.is_draft) return new Draft<A>(parts);
  return new Target<A>(parts);
}

}  // namespace

// A call returns a Status; eyas_propose and eyas_grow return levels or -Status. What makes an
// object returns null where memory lacks.
#pragma GCC visibility push(default)
extern "C" {

// The sizes of the structs of eyas.h, in its order, and how many they are.
int64_t eyas_sizes(int64_t* sizes, int64_t room) {
  constexpr int64_t all[] = {
      sizeof(Part),        sizeof(Weights),       sizeof(Shape),        sizeof(Factors),
      sizeof(Layer),       sizeof(Outer),         sizeof(DecoderParts), sizeof(Positions),
      sizeof(DrawState),   sizeof(Draws),         sizeof(RowsView),     sizeof(Tapped),
      sizeof(ForwardCall), sizeof(Lines),         sizeof(Chosen),       sizeof(VerifyCall),
      sizeof(StatesCall),  sizeof(ProposalsCall), sizeof(Growth),       sizeof(ProductCall)};
  constexpr auto count = static_cast<int64_t>(std::size(all));
  std::copy(all, all + std::min(room, count), sizes);
  return count;
}

Product* eyas_linear(const Weights* weights) {
  return created([&]() -> Product* {
    const auto kind = static_cast<Packed>(weights->parts[0].format);
    return new Linear(sources(*weights), weights->K, kind, weights->gated != 0, weights->bias,
                      weights->threads);
  });
}

Product* eyas_quantised(const Weights* weights) {
  return created([&]() -> Product* {
    std::vector<Format> formats;
    for (int64_t i = 0; i < weights->count; ++i)
      formats.push_back(static_cast<Format>(weights->parts[i].format));
    return new QuantisedProduct(sources(*weights), formats, weights->K, weights->gated != 0,
                                weights->bias, weights->threads);
  });
}

void eyas_free_linear(Product* product) { delete product; }

int64_t eyas_linear_bytes(const Product* product) { return product->bytes(); }

int64_t eyas_multiply(const Product* product, const ProductCall* call) {
  return locked([&]() -> int64_t {
    const int K = product->K, stride = product->blocks * kLanes, M = call->M, T = call->threads;
    const size_t pitch = round_up(K, 2), of_thread = size_t(M) * kPanelColumns;
    RowBlocks rows{nullptr, K / kBlockInputs, M};
    Buffer<RowBlock> blocks;
    Buffer<bf16> plain;
    if (product->is_quantised)
      rows.data = blocks.reserve(size_t(M) * rows.blocks + kAmxRows);
    else
      plain.reserve(M * pitch + kLanes);
    for (int m = 0; m < M; ++m) {
      const float* x = call->x + size_t(m) * K;
      if (product->is_quantised)
        quantise_row<Fp32>(x, rows, m);
      else
        for (int k = 0; k < K; k += kLanes)
          Bf16::store(plain.get() + m * pitch + k, first_lanes(K - k),
                      load(x + k, first_lanes(K - k)));
    }
    std::vector<float> sums(T * of_thread);
    Pool::shared().run(T, [&](int t) {
      const auto put = [&](const Panel& panel, const float* out) {
        for (int m = 0; m < M; ++m)
          std::memcpy(call->y + m * stride + panel.first * kLanes, out + m * kPanelColumns,
                      panel.width * kLanes * sizeof(float));
      };
      float* own = sums.data() + t * of_thread;
      if (product->is_quantised)
        multiply_quantised(static_cast<const QuantisedProduct&>(*product), nullptr, rows, t, T, own,
                           put);
      else
        multiply<Bf16>(static_cast<const Linear&>(*product), nullptr, plain.get(), pitch, M, t, T,
                       own, put);
    });
    return kDone;
  });
}

// The sum of an array, read once by so many threads.
int64_t eyas_read(const int64_t* words, int64_t count, int64_t threads) {
  return guarded([&]() -> int64_t {
    std::atomic<uint64_t> total{0};
    Pool::shared().run(threads, [&](int t) {
      uint64_t sum = 0;
      for (int64_t i = count * t / threads; i < count * (t + 1) / threads; ++i)
        sum += static_cast<uint64_t>(words[i]);
      total += sum;
    });
    return total;
  });
}

Decoder* eyas_new(const DecoderParts* parts) {
  return created(
      [&] { return parts->is_bf16 != 0 ? decoder_of<Bf16>(*parts) : decoder_of<Fp32>(*parts); });
}

void eyas_free(Decoder* decoder) { delete decoder; }

int64_t eyas_set_positions(Decoder* decoder, const Positions* to) {
  return locked([&]() -> int64_t {
    decoder->set_positions(*to);
    return kDone;
  });
}

int64_t eyas_forward(Decoder* decoder, const ForwardCall* call) {
  return answered(decoder, &Decoder::forward, call);
}

int64_t eyas_verify(Decoder* decoder, const VerifyCall* call) {
  return answered(decoder, &Decoder::verify, call);
}

// A walk along `rows` [count, V]: the token drawn from each, up to the first without one (-1).
int64_t eyas_draw(const DrawState* state, const float* rows, int64_t count, int64_t V,
                  int64_t* tokens) {
  return guarded([&]() -> int64_t {
    TokenSampler sampler;
    sampler.begin(*state, V);
    for (int64_t r = 0; r < count; ++r)
      if ((tokens[r] = sampler.next(rows + r * V)) < 0) break;
    return kDone;
  });
}

// What the log-probabilities of a token and of the best are made of: see DrawState. False where the
// best logit is no number.
int64_t eyas_score(const float* logits, int64_t V, int64_t token, int64_t num_top,
                   int64_t* scored_ints, float* scored_logits) {
  return guarded([&]() -> int64_t {
    DrawState state{};
    state.num_top = num_top;
    state.scored_ints = scored_ints, state.scored_logits = scored_logits;
    TokenSampler sampler;
    sampler.begin(state, V);
    return sampler.score(logits, token);
  });
}

int64_t eyas_extend(Decoder* decoder, const StatesCall* call) {
  return answered(decoder, &Decoder::extend, call);
}

int64_t eyas_step(Decoder* decoder, const StatesCall* call) {
  return answered(decoder, &Decoder::step, call);
}

int64_t eyas_proposals(Decoder* decoder, const ProposalsCall* call) {
  return answered(decoder, &Decoder::proposals, call);
}

int64_t eyas_propose(Decoder* decoder, const Growth* growth) {
  return answered(decoder, &Decoder::propose, growth, -kNoMemory);
}

int64_t eyas_grow(Decoder* decoder, const Growth* growth) {
  return answered(decoder, &Decoder::grow, growth, -kNoMemory);
}
}
#pragma GCC visibility pop
