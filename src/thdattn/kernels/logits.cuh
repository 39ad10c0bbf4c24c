// What a softmax is taken of: logits, which follow from scores, the products of a query with keys, and a sink. Inside,
// they are in powers of two. structs.py fills Logits; with -inf, which hides a key, for a score, a logit is -inf.
//
// exact(score): the logit.
// in_time(largest, work): calls work(logit), where logit(score) is the logit, in the least time in which it is right
// for rows with these largest scores; warp-wide.
// natural(score): the logit as users know it.
// probability(score, minus_lse): of a row, whose -lse thd_attn_delta wrote as this kind of logits wants it.
// slope(p, minus_lse): the derivative of the logit, divided by `scale`, where the probability is p.
template <bool kCaps> struct Logits;

// score * scale; minus_lse is in the unit of scores.
template <> struct Logits<false> {
  float scale;
  __device__ __forceinline__ float exact(float score) const { return score * (scale * kLog2e); }
  template <typename Work> __device__ __forceinline__ void in_time(const float (&)[2], Work work) const {
    work([this](float score) { return exact(score); });
  }
  __device__ __forceinline__ float natural(float score) const { return score * scale; }
  __device__ __forceinline__ float probability(float score, float minus_lse) const {
    return exp2_fast(exact(score + minus_lse));
  }
  __device__ __forceinline__ float slope(float, float) const { return 1.f; }
};

// An odd polynomial of scores that rises everywhere. It is the logit where a row has its largest logit, or its lse,
// between `low` and `high`: then no score is above its reach, and those below it are so far from the largest that their
// probabilities vanish with it too.
template <int kTerms> struct Curve {
  float low, high, coefficients[kTerms];
  __device__ __forceinline__ float operator()(float score) const {
    const float square = score * score;
    float sum = coefficients[kTerms - 1];
    #pragma unroll
    for (int i = kTerms - 2; i >= 0; --i) sum = fmaf(sum, square, coefficients[i]);
    return score * sum;
  }
  __device__ __forceinline__ bool reaches(float logit) const { return low <= logit && logit <= high; }
};

// cap * tanh(score * scale / cap); minus_lse is in powers of two.
//
// Hardware has tanh with an error of 2^-11, which a cap of 50 makes one of several percent in a probability; so it is a
// polynomial, a short one far below the cap, and exponentials take over at it, beyond the reach of the longer one.
template <> struct Logits<true> {
  float scale, cap, inverse_cap, doubled, reach;
  Curve<3> below;
  Curve<5> near;
  __device__ __forceinline__ float exact(float score) const { return fabsf(score) <= reach ? near(score) : at(score); }
  // Whatever the score is, with an error of a few 2^-24 of the cap.
  __device__ __forceinline__ float at(float score) const {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.f + exp2_fast(score * doubled)));
    return score == -kInfinity ? score : fmaf(-2.f * cap, inverse, cap);
  }
  template <typename Work> __device__ __forceinline__ void in_time(const float (&largest)[2], Work work) const {
    const float logit[2] = {near(largest[0]), near(largest[1])};  // beyond its reach no logit, but out of bounds too
    in_time_of_all([&](auto curve) {
      auto is_right = [&](int r) { return largest[r] == -kInfinity || curve.reaches(logit[r]); };
      return is_right(0) && is_right(1);
    }, work);
  }
  // The same where the largest logit, or lse, of every row of a warp is in the reach of curves that are right by
  // is_right(curve).
  template <typename IsRight, typename Work>
  __device__ __forceinline__ void in_time_of_all(IsRight is_right, Work work) const {
    if (__all_sync(0xffffffffu, is_right(below)))
      work([this](float score) { return below(score); });
    else if (__all_sync(0xffffffffu, is_right(near)))
      work([this](float score) { return near(score); });
    else
      work([this](float score) { return at(score); });
  }
  __device__ __forceinline__ float natural(float score) const { return exact(score) * kLn2; }
  __device__ __forceinline__ float probability(float score, float minus_lse) const {
    return exp2_fast(exact(score) + minus_lse);
  }
  __device__ __forceinline__ float slope_at(float logit) const {
    return __saturatef(fmaf(logit * logit, -(inverse_cap * inverse_cap), 1.f));
  }
  // From the probability, as nobody has kept the score. Of a hidden key, where p is 0, it is 0.
  __device__ __forceinline__ float slope(float p, float minus_lse) const {
    return slope_at(log2_fast(p) - minus_lse);
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
