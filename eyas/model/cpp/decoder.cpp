// What Python calls: targets and drafts behind a C interface.
#include "draft.h"
#include "target.h"

namespace {

template <class A>
Decoder* make(const Shape& shape, const Factors& factors, const Layer* layers, const Outer& outer,
              const int64_t* target_ids) {
  auto* model =
      new Model<A>(shape, factors, std::vector<Layer>(layers, layers + shape.layers), outer);
  model->target_ids = target_ids;
  return model;
}

RowsView view(const int64_t* ints, void* const* pointers) {
  const auto column = [&](int i) { return static_cast<const int64_t*>(pointers[i]); };
  return RowsView{column(0),
                  column(1),
                  column(2),
                  column(3),
                  column(4),
                  column(5),
                  static_cast<const int32_t*>(pointers[6]),
                  ints[1],
                  ints[2],
                  ints[3],
                  ints[4],
                  ints[5],
                  static_cast<int>(ints[0])};
}

// Calls are serialised: decoders share the pool, and a decoder its buffers.
std::mutex& calls() {
  static std::mutex mutex;
  return mutex;
}

// What a call returns, or `failure`: no exception crosses into Python. They are of memory, or of a
// thread that cannot be started.
template <class Call>
int64_t guarded(Call&& call, int64_t failure = kNoMemory) {
  try {
    return call();
  } catch (const std::exception&) {
    return failure;
  }
}

template <class Call>
int64_t locked(Call&& call, int64_t failure = kNoMemory) {
  const std::lock_guard<std::mutex> guard(calls());
  return guarded(call, failure);
}

// The same of what makes an object: null.
template <class Made, class Make>
Made* made_or_null(Make&& make) {
  try {
    return make();
  } catch (const std::exception&) {
    return nullptr;
  }
}

}  // namespace

// What Python calls. `ints` of rows: M, B, P, first_column, page_size, num_slots; `pointers`:
// token, request, position, slot, prefix_len, seen, page_table, then the cache. A call returns a
// Status; eyas_propose and eyas_grow return levels or -Status. What makes an object returns null
// where memory lacks.
#pragma GCC visibility push(default)
extern "C" {

Product* eyas_linear(const void* const* parts, const int64_t* part_rows, int64_t count, int64_t K,
                     int64_t kind, int64_t gated, const float* bias, int64_t threads) {
  return made_or_null<Product>([&] {
    std::vector<Source> sources;
    for (int64_t i = 0; i < count; ++i)
      sources.push_back({parts[i], static_cast<int>(part_rows[i])});
    return new Linear(sources, static_cast<int>(K), static_cast<Packed>(kind), gated != 0, bias,
                      static_cast<int>(threads));
  });
}

// Parts as they lie in a GGUF file: see QuantisedProduct.
Product* eyas_quantised(const void* const* parts, const int64_t* part_rows, const int64_t* formats,
                        int64_t count, int64_t K, int64_t gated, const float* bias,
                        int64_t threads) {
  return made_or_null<Product>([&] {
    std::vector<Source> sources;
    std::vector<Format> found;
    for (int64_t i = 0; i < count; ++i) {
      sources.push_back({parts[i], static_cast<int>(part_rows[i])});
      found.push_back(static_cast<Format>(formats[i]));
    }
    return new QuantisedProduct(sources, found, static_cast<int>(K), gated != 0, bias,
                                static_cast<int>(threads));
  });
}

void eyas_free_linear(Product* product) { delete product; }
int64_t eyas_linear_bytes(const Product* product) { return static_cast<int64_t>(product->bytes()); }

Decoder* eyas_new(int64_t is_bf16, const Shape* shape, const Factors* factors, const Layer* layers,
                  const Outer* outer, const int64_t* target_ids) {
  static_assert(sizeof(Shape) == 22 * 8 && sizeof(Layer) == 17 * 8 && sizeof(Outer) == 9 * 8);
  return made_or_null<Decoder>([&] {
    return is_bf16 ? make<Bf16>(*shape, *factors, layers, *outer, target_ids)
                   : make<Fp32>(*shape, *factors, layers, *outer, target_ids);
  });
}

void eyas_free(Decoder* decoder) { delete decoder; }

void eyas_set_positions(Decoder* decoder, const float* const* tables, int64_t ropes,
                        const float* query_scales, int64_t length) {
  const std::lock_guard<std::mutex> guard(calls());
  decoder->set_positions(tables, ropes, query_scales, length);
}

int64_t eyas_forward(Decoder* decoder, const int64_t* ints, void* const* pointers,
                     const int64_t* taps, void* aux, int64_t by_slot, const int64_t* logits_of,
                     int64_t R, float* logits, int64_t* best, void* last_hidden) {
  return locked([&]() -> int64_t {
    std::vector<float*> rows(R, nullptr);
    for (int64_t r = 0; logits != nullptr && r < R; ++r)
      rows[r] = logits + r * decoder->vocabulary();
    return decoder->forward(view(ints, pointers), pointers[7], Tapped{taps, aux, by_slot != 0},
                            logits_of, R, rows.data(), best, last_hidden);
  });
}

// ints: B, P, page_size, num_slots, C, places, room. pointers: lens, roots, line, tokens, parents,
// kept, page_table, cache, taps, features, how each request draws, then emitted [B, places], counts
// and the logits [room, V] of those that draw by the caller.
int64_t eyas_verify(Decoder* decoder, const int64_t* ints, void* const* p) {
  return locked([&]() -> int64_t {
    const Lines lines{ints[0],
                      ints[1],
                      ints[2],
                      ints[3],
                      static_cast<const int32_t*>(p[6]),
                      static_cast<const int64_t*>(p[0])};
    const Chosen chosen{static_cast<const int64_t*>(p[1]), static_cast<const int64_t*>(p[3]),
                        static_cast<const int32_t*>(p[2]), static_cast<const int32_t*>(p[4]),
                        static_cast<const uint8_t*>(p[5]), ints[4]};
    const Tapped tapped{static_cast<const int64_t*>(p[8]), p[9], true};
    const Draws draws{static_cast<const DrawState* const*>(p[10]), static_cast<float*>(p[13]),
                      ints[6]};
    return decoder->verify(lines, chosen, p[7], tapped, draws, ints[5],
                           static_cast<int64_t*>(p[11]), static_cast<int64_t*>(p[12]));
  });
}

// A walk along `rows` [count, V]: the token drawn from each, up to the first without one (-1).
int64_t eyas_draw(const DrawState* state, const float* rows, int64_t count, int64_t V,
                  int64_t* tokens) {
  return guarded([&]() -> int64_t {
    TokenSampler sampler;
    sampler.begin(*state, static_cast<int>(V));
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
    state.num_top = num_top, state.scored_ints = scored_ints, state.scored_logits = scored_logits;
    TokenSampler sampler;
    sampler.begin(state, static_cast<int>(V));
    return sampler.score(logits, token);
  });
}

int64_t eyas_extend(Decoder* decoder, const int64_t* ints, void* const* pointers, const void* aux,
                    float* h) {
  return locked(
      [&]() -> int64_t { return decoder->extend(view(ints, pointers), pointers[7], aux, h); });
}

int64_t eyas_step(Decoder* decoder, const int64_t* ints, void* const* pointers, const float* h_in,
                  float* h) {
  return locked(
      [&]() -> int64_t { return decoder->step(view(ints, pointers), pointers[7], h_in, h); });
}

// draws: how the request of each row draws, of which the next token is its num_drawn + place.
int64_t eyas_proposals(Decoder* decoder, const float* h, const DrawState* const* draws,
                       int64_t place, int64_t R, int64_t k, int64_t* ids, float* log_probs) {
  return locked([&]() -> int64_t {
    return decoder->proposals(h, Guess{draws, 1, place}, R, k, ids, log_probs);
  });
}

// ints: B, K, k, width, P, page_size, num_slots. pointers: lens, first_ids, h, first_log_probs,
// page_table, thresholds, cache, tokens, parents, scores, how each request draws.
int64_t eyas_propose(Decoder* decoder, const int64_t* ints, void* const* p) {
  return locked(
      [&]() -> int64_t {
        return decoder->propose(
            Growth{ints[0], ints[1], ints[2], ints[3], ints[4], ints[5], ints[6],
                   static_cast<const int64_t*>(p[0]), static_cast<const int64_t*>(p[1]),
                   static_cast<const float*>(p[2]), static_cast<const float*>(p[3]),
                   static_cast<const int32_t*>(p[4]), static_cast<const double*>(p[5]), p[6],
                   static_cast<const DrawState* const*>(p[10]), static_cast<int64_t*>(p[7]),
                   static_cast<int32_t*>(p[8]), static_cast<float*>(p[9])});
      },
      -kNoMemory);
}

// ints as of eyas_propose. pointers: lens, starts, tokens, features, page_table, thresholds, cache,
// then tokens, parents, scores, how each request draws.
int64_t eyas_grow(Decoder* decoder, const int64_t* ints, void* const* p) {
  return locked(
      [&]() -> int64_t {
        const auto* lens = static_cast<const int64_t*>(p[0]);
        const auto* page_table = static_cast<const int32_t*>(p[4]);
        Growth growth{ints[0],
                      ints[1],
                      ints[2],
                      ints[3],
                      ints[4],
                      ints[5],
                      ints[6],
                      lens,
                      nullptr,
                      nullptr,
                      nullptr,
                      page_table,
                      static_cast<const double*>(p[5]),
                      p[6],
                      static_cast<const DrawState* const*>(p[10]),
                      static_cast<int64_t*>(p[7]),
                      static_cast<int32_t*>(p[8]),
                      static_cast<float*>(p[9])};
        const Lines lines{ints[0], ints[4], ints[5], ints[6], page_table, lens};
        return decoder->grow(lines, static_cast<const int64_t*>(p[1]),
                             static_cast<const int64_t*>(p[2]), p[3], growth);
      },
      -kNoMemory);
}
}
#pragma GCC visibility pop
