// The layers of layers_cuda.py that are no matrix products, all bound by memory. Activations are bf16 in memory and
// float32 in registers; a thread moves 8 of them, 16 bytes, at a time, so widths are multiples of 8. No headers.
//
// "Per row": grid = rows (or fewer blocks that stride over them), block = width / 8 rounded up to whole warps, and
// width <= 4096. "Flat": grid * block >= the vectors or elements that the kernel counts.

using u32 = unsigned int;

struct bf16 { unsigned short bits; };
struct Vec { float x[8]; };

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r;
}
__device__ __forceinline__ Vec unpack(uint4 packed) {
  const u32 pairs[4] = {packed.x, packed.y, packed.z, packed.w};
  Vec v;
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    v.x[2 * i] = __uint_as_float(pairs[i] << 16);
    v.x[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
  }
  return v;
}
__device__ __forceinline__ uint4 pack(const Vec& v) {
  return make_uint4(pack(v.x[0], v.x[1]), pack(v.x[2], v.x[3]), pack(v.x[4], v.x[5]), pack(v.x[6], v.x[7]));
}
__device__ __forceinline__ Vec load(const bf16* p) { return unpack(*(const uint4*)p); }
__device__ __forceinline__ void store(bf16* p, const Vec& v) { *(uint4*)p = pack(v); }
__device__ __forceinline__ Vec load(const float* p) {
  const float4 a = ((const float4*)p)[0], b = ((const float4*)p)[1];
  return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}
__device__ __forceinline__ void store(float* p, const Vec& v) {
  ((float4*)p)[0] = make_float4(v.x[0], v.x[1], v.x[2], v.x[3]);
  ((float4*)p)[1] = make_float4(v.x[4], v.x[5], v.x[6], v.x[7]);
}
template <typename F> __device__ __forceinline__ Vec each(F value) {
  Vec v;
  #pragma unroll
  for (int i = 0; i < 8; ++i) v.x[i] = value(i);
  return v;
}
__device__ __forceinline__ float dot(const Vec& a, const Vec& b) {
  float sum = 0;
  #pragma unroll
  for (int i = 0; i < 8; ++i) sum += a.x[i] * b.x[i];
  return sum;
}

__device__ __forceinline__ float warp_sum(float x) {
  #pragma unroll
  for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
  #pragma unroll
  for (int lane = 16; lane; lane /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lane));
  return x;
}
// Two sums over the block at once, known to every thread.
__device__ __forceinline__ float2 block_sum(float x, float y) {
  __shared__ float2 warps[32];
  x = warp_sum(x), y = warp_sum(y);
  __syncthreads();  // everyone has read the sums of the call before
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = make_float2(x, y);
  __syncthreads();
  x = y = 0;
  for (int warp = 0; warp < blockDim.x / 32; ++warp) x += warps[warp].x, y += warps[warp].y;
  return make_float2(x, y);
}

// sum = x + branch, y = sum / rms(sum) * weight. Without a branch (null) the sum is x, and is not written. Per row.
extern "C" __global__ void __launch_bounds__(512) residual_norm_forward(
    bf16* sum, bf16* y, const bf16* x, const bf16* branch, const bf16* weight, int width, float epsilon) {
  const int column = 8 * threadIdx.x;
  const size_t at = (size_t)blockIdx.x * width + column;
  Vec v = {};
  if (column < width) {
    v = load(x + at);
    if (branch) {
      const Vec b = load(branch + at);
      const uint4 rounded = pack(each([&](int i) { return v.x[i] + b.x[i]; }));
      *(uint4*)(sum + at) = rounded;
      v = unpack(rounded);  // what the backward will find
    }
  }
  const float scale = rsqrtf(block_sum(dot(v, v), 0).x / width + epsilon);
  if (column >= width) return;
  const Vec w = load(weight + column);
  store(y + at, each([&](int i) { return v.x[i] * scale * w.x[i]; }));
}

// dx = dsum + the norm's gradient (dsum may be null). partial (gridDim.x, width): the gradient of the weight over the
// rows of every block, so that their sum has one order. Per row, blocks stride.
extern "C" __global__ void __launch_bounds__(512) residual_norm_backward(
    bf16* dx, float* partial, const bf16* dy, const bf16* dsum, const bf16* x, const bf16* weight, int rows, int width,
    float epsilon) {
  const int column = 8 * threadIdx.x;
  const bool inside = column < width;
  Vec w = {}, dw = {};
  if (inside) w = load(weight + column);
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    const size_t at = (size_t)row * width + column;
    Vec v = {}, g = {}, residual = {};
    if (inside) v = load(x + at), g = load(dy + at);
    if (inside && dsum) residual = load(dsum + at);
    const Vec gw = each([&](int i) { return g.x[i] * w.x[i]; });
    const float2 sums = block_sum(dot(v, v), dot(gw, v));
    const float scale = rsqrtf(sums.x / width + epsilon);
    const float along = scale * scale * scale * sums.y / width;
    if (inside) store(dx + at, each([&](int i) { return residual.x[i] + scale * gw.x[i] - along * v.x[i]; }));
    dw = each([&](int i) { return dw.x[i] + g.x[i] * v.x[i] * scale; });
  }
  if (inside) store(partial + (size_t)blockIdx.x * width + column, dw);
}

// Between qkv (rows, heads + 2 * kv_heads, head_dim), whose rows lie `pitch` elements apart, and q, k, v; q and k are
// turned by the angles on the way out and turned back on the way in (backward). rotation: (2, rows, head_dim / 2).
// Flat: vectors of half the heads' width.
extern "C" __global__ void rope(
    bf16* q, bf16* k, bf16* v, bf16* qkv, const float* rotation, int rows, int heads, int kv_heads, int head_dim,
    int pitch, int backward) {
  const int half = head_dim / 2, slots = heads + 2 * kv_heads;
  const u32 index = blockIdx.x * blockDim.x + threadIdx.x;
  const int column = index % (half / 8) * 8, slot = index / (half / 8) % slots;
  const size_t row = index / (half / 8) / slots;
  if (row >= rows) return;

  bf16* const whole = qkv + row * pitch + slot * head_dim + column;
  bf16* const part = column + (slot < heads ? q + (row * heads + slot) * head_dim
                               : slot < heads + kv_heads ? k + (row * kv_heads + slot - heads) * head_dim
                               : v + (row * kv_heads + slot - heads - kv_heads) * head_dim);
  const bf16* const in = backward ? part : whole;
  bf16* const out = backward ? whole : part;
  const Vec a = load(in), b = load(in + half);
  if (slot >= heads + kv_heads) {
    store(out, a), store(out + half, b);
    return;
  }
  const float sign = backward ? -1.f : 1.f;
  const Vec cos = load(rotation + row * half + column), sin = load(rotation + (rows + row) * half + column);
  store(out, each([&](int i) { return a.x[i] * cos.x[i] - sign * b.x[i] * sin.x[i]; }));
  store(out + half, each([&](int i) { return b.x[i] * cos.x[i] + sign * a.x[i] * sin.x[i]; }));
}

__device__ __forceinline__ float sigmoid(float x) { return 1 / (1 + __expf(-x)); }

// y (rows, hidden) = silu(gate) * up, of gate_up (rows, 2 * hidden). Flat: vectors of y.
extern "C" __global__ void swiglu_forward(bf16* y, const bf16* gate_up, int rows, int hidden) {
  const size_t index = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  const size_t row = index / (hidden / 8), column = index % (hidden / 8) * 8;
  if (row >= rows) return;
  const Vec gate = load(gate_up + 2 * row * hidden + column), up = load(gate_up + (2 * row + 1) * hidden + column);
  store(y + row * hidden + column, each([&](int i) { return gate.x[i] * sigmoid(gate.x[i]) * up.x[i]; }));
}

extern "C" __global__ void swiglu_backward(bf16* dgate_up, const bf16* dy, const bf16* gate_up, int rows, int hidden) {
  const size_t index = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  const size_t row = index / (hidden / 8), column = index % (hidden / 8) * 8;
  if (row >= rows) return;
  const size_t at = 2 * row * hidden + column;
  const Vec gate = load(gate_up + at), up = load(gate_up + at + hidden), d = load(dy + row * hidden + column);
  store(dgate_up + at, each([&](int i) {
    const float s = sigmoid(gate.x[i]);
    return d.x[i] * up.x[i] * s * (1 + gate.x[i] * (1 - s));
  }));
  store(dgate_up + at + hidden, each([&](int i) { return d.x[i] * gate.x[i] * sigmoid(gate.x[i]); }));
}

// nats (rows,) and dlogits (rows, columns) = (softmax - onehot(target)) / num_targets over the first `vocabulary`
// columns; exactly 0 elsewhere and where the target is -1. Grid * block >= 32 * rows: a warp per row.
extern "C" __global__ void cross_entropy(
    float* nats, bf16* dlogits, const float* logits, const int* targets, int rows, int columns, int vocabulary,
    const float* num_targets) {
  const size_t row = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (row >= rows) return;
  logits += row * columns, dlogits += row * columns;
  const int target = targets[row];
  const float scale = 1 / *num_targets;

  float largest = __int_as_float(0xff800000), total = 0;
  for (int c = lane; c < vocabulary; c += 32) largest = fmaxf(largest, logits[c]);
  largest = warp_max(largest);
  for (int c = lane; c < vocabulary; c += 32) total += __expf(logits[c] - largest);
  const float log_sum = largest + __logf(warp_sum(total));
  for (int c = lane; c < columns; c += 32) {
    const bool counts = target >= 0 && c < vocabulary;
    const float d = counts ? (__expf(logits[c] - log_sum) - (c == target)) * scale : 0.f;
    dlogits[c].bits = (unsigned short)pack(d, 0);
  }
  if (lane == 0) nats[row] = target >= 0 ? log_sum - logits[target] : 0.f;
}

// out (rows, columns) = 1 where the column is the row's token, else 0. Flat: elements.
extern "C" __global__ void one_hot(bf16* out, const int* tokens, int rows, int columns) {
  const size_t index = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (index < (size_t)rows * columns) out[index].bits = tokens[index / columns] == index % columns ? 0x3f80 : 0;
}

// partial (gridDim.x,): sums of squares of x (n,). Any grid and block: threads stride.
extern "C" __global__ void sum_of_squares(float* partial, const float* x, size_t n) {
  float sum = 0;
  for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
    sum += x[i] * x[i];
  sum = block_sum(sum, 0).x;
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

struct AdamWStep { float beta1, beta2, size, square_scale, epsilon, keep, max_norm; };  // layers.AdamWStep

// See layers.adamw_update; norm is read here, so that nothing waits for it. Flat: elements.
extern "C" __global__ void adamw_update(
    float* weights, bf16* copy, const float* gradient, float* mean, float* square, const float* norm, size_t n,
    AdamWStep step) {
  const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const float g = gradient[i] * fminf(1, step.max_norm / fmaxf(*norm, step.epsilon));
  const float m = mean[i] + (1 - step.beta1) * (g - mean[i]);
  const float s = square[i] + (1 - step.beta2) * (g * g - square[i]);
  const float w = step.keep * weights[i] - step.size * m / (sqrtf(s * step.square_scale) + step.epsilon);
  mean[i] = m, square[i] = s, weights[i] = w;
  copy[i].bits = (unsigned short)pack(w, 0);
}
