// What a softmax is taken of: logits, which follow from scores, the products of a query with keys, and a sink. Inside,
// they are in powers of two. structs.py fills Logits; with -inf, which hides a key, for a score, a logit is -inf.
//
// exact(score): the logit. near(score): the same in less time, where the largest logit of a row, or its lse, is_near.
// natural(score): the logit as users know it.
// probability(score, minus_lse): of a row, whose -lse thd_attn_delta wrote as this kind of logits wants it.
// slope(p, minus_lse): the derivative of the logit, divided by `scale`, where the probability is p.
template <bool kCaps> struct Logits;

// score * scale; minus_lse is in the unit of scores.
template <> struct Logits<false> {
  float scale;
  __device__ __forceinline__ float exact(float score) const { return score * (scale * kLog2e); }
  __device__ __forceinline__ float near(float score) const { return exact(score); }
  __device__ __forceinline__ float natural(float score) const { return score * scale; }
  __device__ __forceinline__ float probability(float score, float minus_lse) const {
    return exp2_fast(exact(score + minus_lse));
  }
  __device__ __forceinline__ float slope(float, float) const { return 1.f; }
};

// cap * tanh(score * scale / cap); minus_lse is in powers of two.
//
// Hardware has tanh with an error of 2^-11, which a cap of 50 makes one of several percent in a probability; so it is
// an odd polynomial of the score, up to `reach` in size, and exponentials take over beyond. The polynomial rises
// everywhere. Where a row has its largest logit between `low` and `high`, no score is above its reach, and those below
// are so far from the largest that their probabilities vanish with it too: no need to look at each.
template <> struct Logits<true> {
  float scale, cap, inverse_cap, doubled, reach, low, high, coefficients[5];
  __device__ __forceinline__ float exact(float score) const { return fabsf(score) <= reach ? near(score) : far(score); }
  __device__ __forceinline__ float near(float score) const {
    const float square = score * score;
    float sum = coefficients[4];
    #pragma unroll
    for (int i = 3; i >= 0; --i) sum = fmaf(sum, square, coefficients[i]);
    return score * sum;
  }
  // Whatever the score is, with an error of a few 2^-24 of the cap.
  __device__ __forceinline__ float far(float score) const {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.f + exp2_fast(score * doubled)));
    return score == -kInfinity ? score : fmaf(-2.f * cap, inverse, cap);
  }
  __device__ __forceinline__ bool is_near(float logit) const { return low <= logit && logit <= high; }
  __device__ __forceinline__ float natural(float score) const { return exact(score) * kLn2; }
  __device__ __forceinline__ float probability(float score, float minus_lse) const {
    return exp2_fast(exact(score) + minus_lse);
  }
  // From the probability, as nobody has kept the score. Of a hidden key, where p is 0, it is 0.
  __device__ __forceinline__ float slope(float p, float minus_lse) const {
    float logit;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(logit) : "f"(p));
    const float share = (logit - minus_lse) * inverse_cap;
    return __saturatef(fmaf(-share, share, 1.f));
  }
};
CHECK_Logits;

// What a sink, one more logit of a row without a value, makes of the lse of its keys, and their share beside it.
struct Rest { float lse, share; };
__device__ __forceinline__ Rest beside_sink(float lse, float sink) {
  const float top = fmaxf(lse, sink), less = exp2_fast((fminf(lse, sink) - top) * kLog2e);
  const float all = top + __log2f(1.f + less) * kLn2;
  return {all, exp2_fast((lse - all) * kLog2e)};
}
