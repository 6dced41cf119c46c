// What Python and the library pass to each other. `eyas/model/structs.py` reads this file, so a
// field is an int64_t, a double, a float, a pointer, one of the structs above it, or an array of
// these; `eyas_sizes` tells Python what the compiler made of it. Arrays are the caller's, without
// gaps, and null is none.
//
// Letters: M rows, R rows with logits, B requests, P pages of the longest, C candidates of a
// request, H hidden, V vocabulary.
#pragma once

#include <cstdint>

class Product;

// A model

// data [rows, K]: of eyas_linear a `Packed` of linear.h, of eyas_quantised a `Format` of formats.h,
// as blocks lie in a GGUF file.
struct Part {
  const void* data;
  int64_t rows, format;
};

// The weights of one product, stacked. gated: of two parts, whose outputs are joined. bias: of all
// rows. threads: that will multiply it.
struct Weights {
  const Part* parts;
  int64_t count, K, gated, threads;
  const float* bias;
};

// slot_width: numbers that a layer keeps of a token.
struct Shape {
  int64_t layers, hidden, inner, Hq, Hk, D, vocab, embed_rows, embed_kind, is_draft;
  int64_t norm_before_residual, norm_output, threads, slot_width, rotary_dims, wide_head_norms,
      activation, num_experts, experts_per_token, expert_inner, renormalises, routes_input,
      conv_kernel;
};

// softcaps: 0 for none.
struct Factors {
  float eps, score, softcap, embed, residual, logit, logit_softcap;
};

// in: queries, keys and values, or B, C and x of a convolution. experts: gate_up and down of each;
// gate_up and down beside them are of an MLP that every row takes. out_norm, mlp_out_norm: of what
// is added to the residual stream. taps [conv_kernel, H]: of the convolution. window, chunk: 0 for
// none; rope: -1 for none; scales: queries, by their positions.
struct Layer {
  const Product *in, *out, *gate_up, *down, *router, *const *experts;
  const float *input_norm, *out_norm, *post_norm, *mlp_out_norm, *q_norm, *k_norm, *sinks, *taps,
      *taps_bias;
  int64_t window, chunk, rope, scales;
};

// head_rows [V, H]: of a draft whose head is a coarse one, its weights in the decoder's precision;
// else null.
struct Outer {
  const Product *head, *fc;
  const float *final_norm, *hidden_norm, *features_norm, *feature_norms[3];
  const void *embed, *head_rows;
};

// target_ids [V]: of a draft, the target's id of each of its tokens, or null for the same.
struct DecoderParts {
  Shape shape;
  Factors factors;
  Outer outer;
  const Layer* layers;
  const int64_t* target_ids;
  int64_t is_bf16;
};

// Cosines and sines of each rope, [length, rotary_dims / 2]; query_scales [length]: what a query is
// multiplied by at each position.
struct Positions {
  const float* const* tables;
  const float* query_scales;
  int64_t ropes, length;
};

// Draws

// How a request draws its next token, as `eyas/model/draws.py` says.
struct DrawState {
  double temperature, top_p, min_p, repetition, frequency, presence;
  int64_t top_k, seed, num_drawn, min_tokens, num_seen, num_biased, num_ends, num_top, by_caller;
  const int64_t *seen, *counts, *biased;
  const double* biases;
  const int64_t* ends;
  int64_t* scored_ints;  // [kMostPlaces, 1 + num_top]: sum of weights at temperature 1, the best
                         // ids; null without log-probabilities
  float* scored_logits;  // [kMostPlaces, 2 + num_top]: the best, the token's, those of the best ids
};

// How the requests of a round draw: null where the best logit is the token. logits [room, V]: of
// those that draw by_caller.
struct Draws {
  const DrawState* const* of;
  float* logits;
  int64_t room;
};

// Calls

// The rows of a forward, as `eyas/model/rows.py` has them.
struct RowsView {
  const int64_t *token, *request, *position, *slot, *prefix_len, *seen;
  const int32_t* page_table;
  int64_t B, P, first_column, page_size, num_slots, M;
};

// Where a target's features go: taps, 3 layers; rows of aux [., 3, H] by row, or by slot.
struct Tapped {
  const int64_t* taps;
  void* aux;
  int64_t by_slot;
};

// logits_of [R]: which rows have logits [R, V] and a best token [R]; null for all. last_hidden
// [M, H]: after the final norm.
struct ForwardCall {
  RowsView rows;
  void* cache;
  Tapped tapped;
  const int64_t* logits_of;
  int64_t R;
  float* logits;
  int64_t* best;
  void* last_hidden;
};

// The pages of requests and the columns [B] that they have in the cache.
struct Lines {
  int64_t B, P, page_size, num_slots;
  const int32_t* page_table;  // [B, P]
  const int64_t* lens;

  bool has(int64_t column) const { return column >= 0 && column / page_size < P; }
  int64_t slot(int64_t b, int64_t column) const {
    return static_cast<int64_t>(page_table[b * P + column / page_size]) * page_size +
           column % page_size;
  }
};

// The roots [B] of trees and the candidates of the requests that drafted: line[b] of the arrays
// [., C], or none (-1).
struct Chosen {
  const int64_t *roots, *tokens;
  const int32_t *line, *parents;
  const uint8_t* kept;
  int64_t C;
};

// Gives the tokens of each walk, emitted [B, places], and how many they are, counts [B].
struct VerifyCall {
  Lines lines;
  Chosen chosen;
  void* cache;
  Tapped tapped;
  Draws draws;
  int64_t places;
  int64_t *emitted, *counts;
};

// A draft's rows: inputs are features [M, 3 * H] in the cache's precision, or the states [M, H] of
// the rows' parents; h [M, H] is given, or null for the rows' keys and values alone.
struct StatesCall {
  RowsView rows;
  void* cache;
  const void* inputs;
  float* h;
};

// The k best tokens of each state h [R, H], ids and log_probs [R, k]. draws: how the request of
// each row draws, of which the next token is its num_drawn + place.
struct ProposalsCall {
  const float* h;
  const DrawState* const* draws;
  int64_t place, R, k;
  int64_t* ids;
  float* log_probs;
};

// The growth of trees: k candidates of a row, `width` rows of a request a step, thresholds
// [num_draft_steps]. It begins with the roots' states h [B, H] and their proposals [B, k], or with
// tokens and features of the columns starts[b] .. lens[b]. Gives tokens, scores and parents of all
// candidates [B, C].
struct Growth {
  int64_t B, num_draft_steps, k, width, P, page_size, num_slots;
  const int64_t *lens, *first_ids;
  const float *h, *first_log_probs;
  const int32_t* page_table;
  const double* thresholds;
  void* kv;
  const DrawState* const* draws;
  int64_t* tokens;
  int32_t* parents;
  float* scores;
  const int64_t *starts, *entered;
  const void* features;
};

// One product by itself, of rows that are quantised or else rounded to bf16: x [M, K] to
// y [M, 16 * blocks].
struct ProductCall {
  const float* x;
  float* y;
  int64_t M, threads;
};
