// The online softmax of the Hopper forward. With capped logits it chooses the cheapest valid approximation.

#pragma once

#include "kernels/hopper/common.cuh"

// Online softmax of a thread's two rows, in powers of two.
//
// Probabilities are relative to a base, which any value may be: the quotient is the same. The base follows the row
// maximum only if that has grown by more than kSlack and outweighs what the thread has summed. So sums stay far from
// overflow, and accumulators are rarely rescaled. At the base a probability is 1, which 16 bits hold exactly; so the
// base must be near the keys that dominate an output.
//
// kLazyRowMax: each thread tests its own maximum, and the row's threads compare theirs only if a base may have to move.
// This helps most if matrix products are short.
template <bool kCaps, bool kLazyRowMax>
struct Softmax {
  static constexpr float kSlack = 8.f, kNothingYet = -1e30f;
  Logits<kCaps> logits;
  float row_max[2] = {-kInfinity, -kInfinity}, base[2] = {kNothingYet, kNothingYet}, row_sum[2] = {};
  float2 shrink;                                      // factor for what the rows have accumulated, if `rescale`
  bool rescale;

  // Turns new scores into probabilities. depth: that of the scores before some were hidden, if kCaps.
  template <int kBlocks>
  __device__ __forceinline__ void add(float (&score)[kBlocks][4], float depth, bool hidden) {
    if constexpr (kCaps) {
      add_capped(score, depth, hidden);
    } else if constexpr (kLazyRowMax) {
      add_with_lazy_row_max(score);
    } else {
      raise_tops(score);
      follow(logits.exact(row_max[0]), logits.exact(row_max[1]));
      weigh(score, [&](float s) { return logits.exact(s); });
    }
  }

  // Returns the largest logit with which the base need not move. It counts only what this thread has summed, a part of
  // its row, so half of that is the limit.
  __device__ __forceinline__ float limit(int r) const {
    return fmaf(kSlack, __saturatef(fmaf(log2_fast(row_sum[r]), 1.f / kSlack, -1.f / kSlack)), base[r]);
  }
  // Computes the row maxima of new scores of any sign, over all four threads of a row.
  template <int kBlocks>
  static __device__ __forceinline__ void reduce_peaks(float (&peak)[2], int2 top, const float (&score)[kBlocks][4]) {
    if (__any_sync(0xffffffffu, (top.x | top.y) < 0)) {
      peak[0] = peak[1] = -kInfinity;
      #pragma unroll
      for (int i = 0; i < 4 * kBlocks; ++i) peak[i % 4 / 2] = fmaxf(peak[i % 4 / 2], score[i / 4][i % 4]);
    }
    peak[0] = quad_max(peak[0]), peak[1] = quad_max(peak[1]);
  }

  template <int kBlocks>
  __device__ __forceinline__ void add_with_lazy_row_max(float (&score)[kBlocks][4]) {
    const int2 top = tops(score);
    float peak[2] = {__int_as_float(top.x), __int_as_float(top.y)};
    const float over = fmaxf(logits.exact(peak[0]) - limit(0), logits.exact(peak[1]) - limit(1));
    rescale = false;
    if (!__all_sync(0xffffffffu, (top.x | top.y | ~__float_as_int(over)) >= 0)) {  // tests of their signs
      reduce_peaks(peak, top, score);
      follow(logits.exact(peak[0]), logits.exact(peak[1]));
    }
    row_max[0] = fmaxf(row_max[0], peak[0]), row_max[1] = fmaxf(row_max[1], peak[1]);
    weigh(score, [&](float s) { return logits.exact(s); });
  }

  // Does the same for capped logits. Usually all scores are also within the reach of the cheapest approximation.
  template <int kBlocks>
  __device__ __forceinline__ void add_capped(float (&score)[kBlocks][4], float depth, bool hidden) {
    const int2 top = tops(score);
    float peak[2] = {__int_as_float(top.x), __int_as_float(top.y)};
    const float farthest = fmaxf(fmaxf(peak[0], peak[1]), depth);
    const float over = fmaxf(fmaxf(logits.quick(peak[0]) - limit(0), logits.quick(peak[1]) - limit(1)),
                             logits.beyond(hidden ? kInfinity : farthest));
    const bool usual = __all_sync(0xffffffffu, (top.x | top.y | ~__float_as_int(over)) >= 0);  // tests of their signs
    int way = logits.kQuick;
    if (!usual) {
      reduce_peaks(peak, top, score);
      way = logits.way_for(farthest, hidden);
    }
    row_max[0] = fmaxf(row_max[0], peak[0]), row_max[1] = fmaxf(row_max[1], peak[1]);
    rescale = false;
    auto follow_and_weigh = [&](auto logit) {
      if (!usual) follow(logit(peak[0]), logit(peak[1]));
      weigh(score, logit);
    };
    if (way == logits.kQuick)
      follow_and_weigh([&](float s) { return logits.quick(s); });
    else
      logits.go(way, [&](auto logit, auto) { follow_and_weigh(logit); });
  }

  // Returns the row maxima of new scores as integers, compared three at a time. They are valid if a score of the row is
  // not below 0.
  template <int kBlocks> static __device__ __forceinline__ int2 tops(const float (&score)[kBlocks][4]) {
    int top[2] = {__float_as_int(score[0][0]), __float_as_int(score[0][2])};
    #pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i)
      top[i % 2] = __vimax3_s32(top[i % 2], __float_as_int(score[i / 2][i % 2 * 2]),
                                __float_as_int(score[i / 2][i % 2 * 2 + 1]));
    return make_int2(top[0], top[1]);
  }

  // Raises the row maxima by new scores.
  template <int kBlocks>
  __device__ __forceinline__ void raise_tops(const float (&score)[kBlocks][4]) {
    const int2 top = tops(score);
    if (__any_sync(0xffffffffu, (top.x | top.y) < 0)) {
      #pragma unroll
      for (int i = 0; i < 4 * kBlocks; ++i) row_max[i % 4 / 2] = fmaxf(row_max[i % 4 / 2], score[i / 4][i % 4]);
    }
    row_max[0] = quad_max(fmaxf(row_max[0], __int_as_float(top.x)));
    row_max[1] = quad_max(fmaxf(row_max[1], __int_as_float(top.y)));
  }

  template <int kBlocks, typename Logit>
  __device__ __forceinline__ void weigh(float (&score)[kBlocks][4], Logit logit) {
    if constexpr (kCaps) pin(score);                  // keeps the compiler from hoisting code out of the branches
    #pragma unroll
    for (int i = 0; i < 4 * kBlocks; ++i) {
      float& s = score[i / 4][i % 4];
      s = exp2_fast(logit(s) - base[i % 4 / 2]);
      row_sum[i % 4 / 2] += s;
    }
  }

  // Moves bases to the largest logits where they must follow. No row may change another one's base, so only the rows of
  // the warp that need it move, with all four of their threads.
  __device__ __forceinline__ void follow(float top0, float top1) {
    auto is_above = [&](float top, int r) {
      return top > fmaf(kSlack, __saturatef(log2_fast(row_sum[r]) / kSlack), base[r]);
    };
    const bool above[2] = {is_above(top0, 0), is_above(top1, 1)};
    rescale = __any_sync(0xffffffffu, above[0] || above[1]);
    if (!rescale) return;
    auto move = [&](bool above, float top, int r) {
      const float next = __ballot_sync(0xffffffffu, above) >> threadIdx.x % kWarp / 4 * 4 & 15 ? top : base[r];
      const float factor = exp2_fast(base[r] - next);
      row_sum[r] *= factor;
      base[r] = next;
      return factor;
    };
    shrink.x = move(above[0], top0, 0), shrink.y = move(above[1], top1, 1);
  }
};
