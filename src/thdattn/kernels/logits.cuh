// Logits from scores, and attention sinks. A score is the product of a query with a key. Inside kernels, logits are in
// powers of two. engines/cuda/softcap.py fills Logits. A score of -inf, which hides a key, gives a logit of -inf.
//
// exact(score)                the logit
// quick(score)                the logit by the cheapest approximation, which holds where `beyond` is at most 0
// way_for(farthest, hidden)   for a warp: the cheapest approximation that holds for scores up to `farthest` from 0 in
//                             every lane, and for -inf if some are `hidden`
// go(way, work)               calls work(logit, slope), the functions of that approximation
// natural(score)              the logit as users know it, in powers of e
// probability(score, minus_lse)   the probability, with -lse in the unit in which thd_attn_delta wrote it
// slope(p, minus_lse)         the derivative of the logit divided by `scale`, where the probability is p

#pragma once

#include "kernels/common.cuh"

template <bool kCaps> struct Logits;

// Logits that are score * scale. minus_lse is in the unit of scores.
template <> struct Logits<false> {
  float scale;
  __device__ __forceinline__ float exact(float score) const { return score * (scale * kLog2e); }
  __device__ __forceinline__ int way_for(float, bool) const { return 0; }
  __device__ __forceinline__ float natural(float score) const { return score * scale; }
  __device__ __forceinline__ float probability(float score, float minus_lse) const {
    return exp2_fast(exact(score + minus_lse));
  }
  __device__ __forceinline__ float slope(float, float) const { return 1.f; }
};

// Returns how far the smallest number is below 0, or a number not above 0 if none is. Floats are compared as integers,
// three at a time, in two chains, because each comparison waits for the one before.
template <int kBlocks> __device__ __forceinline__ float depth(const float (&x)[kBlocks][4]) {
  u32 least[2] = {};
  #pragma unroll
  for (int i = 0; i < 2 * kBlocks; ++i)
    least[i % 2] = __vimax3_u32(least[i % 2], __float_as_uint(x[i / 2][i % 2 * 2]),
                                __float_as_uint(x[i / 2][i % 2 * 2 + 1]));
  return -__uint_as_float(max(least[0], least[1]));
}
// Returns how far the farthest number is from 0.
template <int kBlocks> __device__ __forceinline__ float distance(const float (&x)[kBlocks][4]) {
  int most[2] = {};
  #pragma unroll
  for (int i = 0; i < 2 * kBlocks; ++i)
    most[i % 2] = __vimax3_s32(most[i % 2], __float_as_int(x[i / 2][i % 2 * 2]),
                               __float_as_int(x[i / 2][i % 2 * 2 + 1]));
  return fmaxf(__int_as_float(max(most[0], most[1])), depth(x));
}

// An odd polynomial that approximates the logit for scores at most `reach` from 0.
template <int kTerms> struct Curve {
  float reach, coefficients[kTerms];
  __device__ __forceinline__ float operator()(float score) const {
    const float square = score * score;
    float sum = coefficients[kTerms - 1];
    #pragma unroll
    for (int i = kTerms - 2; i >= 0; --i) sum = fmaf(sum, square, coefficients[i]);
    return score * sum;
  }
};

// Logits that are cap * tanh(score * scale / cap). minus_lse is in powers of two.
//
// The hardware's tanh has an error of 2^-11. With a cap of 50, that is several percent of a probability. So polynomials
// approximate tanh, with fewer terms the farther scores are below the cap. Beyond the reach of the longest polynomial,
// exponentials take over (kTanh). The last terms of three and five are positive, so that they map -inf to -inf.
template <> struct Logits<true> {
  static constexpr int kQuick = 2, kTanh = 0;         // a way is the number of its terms
  float scale, cap, inverse_cap, doubled, slopes[2];  // slopes, for `two`: slopes[0] + slopes[1] score^2
  Curve<2> two;
  Curve<3> three;
  Curve<5> five;
  __device__ __forceinline__ float exact(float score) const {
    return fabsf(score) <= five.reach ? five(score) : at(score);
  }
  __device__ __forceinline__ float quick(float score) const { return two(score); }
  __device__ __forceinline__ float beyond(float farthest) const { return farthest - two.reach; }
  // Returns the logit of any score, with an error of a few 2^-24 of the cap.
  __device__ __forceinline__ float at(float score) const {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.f + exp2_fast(score * doubled)));
    return score == -kInfinity ? score : fmaf(-2.f * cap, inverse, cap);
  }
  __device__ __forceinline__ int way_for(float farthest, bool hidden) const {
    const float most = __int_as_float(__reduce_max_sync(0xffffffffu, __float_as_int(farthest)));
    if (!hidden && most <= two.reach) return 2;
    return most <= three.reach ? 3 : most <= five.reach ? 5 : kTanh;
  }
  template <typename Work> __device__ __forceinline__ void go(int way, Work work) const {
    auto slope = [this](float, float logit) { return slope_at(logit); };
    if (way == 2)
      work([this](float s) { return two(s); }, [this](float s, float) { return fmaf(s * s, slopes[1], slopes[0]); });
    else if (way == 3)
      work([this](float s) { return three(s); }, slope);
    else if (way == 5)
      work([this](float s) { return five(s); }, slope);
    else
      work([this](float s) { return at(s); }, slope);
  }
  __device__ __forceinline__ float natural(float score) const { return exact(score) * kLn2; }
  __device__ __forceinline__ float probability(float score, float minus_lse) const {
    return exp2_fast(exact(score) + minus_lse);
  }
  __device__ __forceinline__ float slope_at(float logit) const {
    return __saturatef(fmaf(logit * logit, -(inverse_cap * inverse_cap), 1.f));
  }
  // Computes the slope from the probability, as no kernel has kept the score. It is 0 for a hidden key, where p is 0.
  __device__ __forceinline__ float slope(float p, float minus_lse) const {
    return slope_at(log2_fast(p) - minus_lse);
  }
};
CHECK_Logits;

// Adds a sink to a row: one more logit without a value. Returns the new lse, and the weight of the keys beside the
// sink.
struct JoinedSink { float lse, keys_weight; };
__device__ __forceinline__ JoinedSink join_sink(float lse, float sink) {
  const float top = fmaxf(lse, sink), less = exp2_fast((fminf(lse, sink) - top) * kLog2e);
  const float all = top + __log2f(1.f + less) * kLn2;
  return {all, exp2_fast((lse - all) * kLog2e)};
}
