// Prefix trees in the Mamba-2 mixer. Every node has segments of its own, in front of whose rows are copies of the rows
// that its convolution reads; see mamba/trees.py. So trees change only which state a segment starts from.

#pragma once

#include "kernels/mamba/conv_backward.cu"
#include "kernels/mamba/scan.cu"

// Where a segment gets the state before it. from: itself, if it goes on from the segment in front of it; an earlier
// segment that starts from the same state; or -1, from 0. is_shared: a later segment starts from its state too.
struct Start { int from, is_shared; };

// Computes thd_ssd_fold of trees. A fork is read from the first segment behind it, which is the next one in memory. The
// gradients of the others behind it are added to the term of that one.
// Launch: as thd_ssd_fold.
__global__ void __launch_bounds__(kFoldThreads) thd_ssd_fold_trees(
    float4* states, const float* decays, const Start* starts, int begin, int step, int segments, int heads,
    int numbers) {
  const size_t fours = (size_t)heads * numbers / 4, at = (size_t)blockIdx.x * kFoldThreads + threadIdx.x;
  if (at >= fours) return;
  const float4 zero = make_float4(0.f, 0.f, 0.f, 0.f);
  float4 state = zero;
  walk([&](int segment) { return states[segment * fours + at]; }, decays + 4 * at / numbers, heads, begin, step,
       segments, [&](int segment, float4 own, float decay) {
         const Start start = starts[segment];
         float4 &here = states[segment * fours + at], &there = states[max(start.from, 0) * fours + at];
         const bool forks = start.from != segment;
         if (step > 0 && forks) state = start.from < 0 ? zero : there;
         if (step < 0 && start.is_shared) own = here;  // it may have been loaded before the others were added
         here = state;
         state = passed_on(state, decay, own);
         if (step < 0 && forks) {
           if (start.from >= 0) there = passed_on(state, 1.f, there);
           state = zero;
         }
         return true;
       });
}

// Sets dt of some rows, before softplus, to -inf, so that they change no state.
// Launch: grid rows, block 128.
template <typename T>
__global__ void thd_mixer_clear_dt(T* zxbcdt, const int* rows, int columns, int heads) {
  T* const dt = zxbcdt + ((size_t)rows[blockIdx.x] + 1) * columns - heads;
  for (int head = threadIdx.x; head < heads; head += blockDim.x)
    dt[head].bits = (unsigned short)pack<T>(__int_as_float(0xff800000), 0.f);
}

// Adds to the gradients of x, B and C of some rows those of their copies, in order.
//
// of_copies, dzxbcdt: rows of `columns` numbers, of the pack with the copies and of the one without
// rows, begins, places: the copies of rows[i] are places[begins[i]] to places[begins[i + 1] - 1]
// Launch: grid (rows, ceil(channels / 256)), block 128.
template <typename T>
__global__ void __launch_bounds__(kConvBackThreads) thd_mixer_add_copies(
    const T* __restrict__ of_copies, T* __restrict__ dzxbcdt, const int* __restrict__ rows,
    const int* __restrict__ begins, const int* __restrict__ places, int columns, int inner, int channels) {
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * 2, end = begins[blockIdx.x + 1];
  if (column >= channels) return;
  T* const into = dzxbcdt + (size_t)rows[blockIdx.x] * columns + inner + column;
  float2 total = load_pair(into).numbers();
  for (int i = begins[blockIdx.x]; i < end; ++i) {
    const float2 copy = load_pair(of_copies + (size_t)places[i] * columns + inner + column).numbers();
    total.x += copy.x, total.y += copy.y;
  }
  store_pair(into, total.x, total.y);
}
