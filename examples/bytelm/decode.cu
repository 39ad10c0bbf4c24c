// What a layer does with the next row of a few texts, see layers.py; layers.cu comes before.
//
// The products of a few rows with a weight: a thread block has 8 rows of the weight and 16 of x at a time, its warps
// share the columns, and their sums are added in one order. Rows are normalised at the end, as the norm is a factor per
// row. Bound by reading the weight, and by what lies between two kernels: so a kernel starts while the one before still
// runs, asks for all that it reads of the weight, and only then waits; the kernel before may not write the weight.

constexpr int kOutputs = 8, kTexts = 16, kHeld = 4;  // kHeld: vectors of the weight that a lane asks for at once

// What a warp has in shared memory: its columns of the weights, of 8 rows of x and of the gain, and its share of sums.
template <int kWeights>
struct Part {
  uint4 weight[kWeights][kHeld][32], x[kHeld][32], gain[kHeld][4];
  float sums[kWeights][kTexts * kOutputs], squares[kTexts];
};

static_assert(sizeof(Part<1>) == 4928 && sizeof(Part<2>) == 7488, "WARP_BYTES of layers_cuda.py are others");

// Of each of the weights of a thread block, the row that a lane reads: output lane / 4.
template <int kWeights> struct Rows { const bf16* of[kWeights]; };

// Waits until all that was written before is there, and lets the next kernel start.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void copy_async(uint4* to, const bf16* from, bool inside) {
  const u32 there = (u32)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(there), "l"(from), "r"(inside ? 16 : 0));
}
__device__ __forceinline__ uint4 read(const bf16* p, bool inside) { return inside ? *(const uint4*)p : uint4{}; }

// x becomes x times the gain, rounded; returns what the rounding took away. Adds the squares of x to sum.
__device__ __forceinline__ uint4 scale(uint4& x, uint4 gain, float& sum) {
  const Vec v = unpack(x), g = unpack(gain);
  sum += dot(v, v);
  const Vec exact = each([&](int i) { return v.x[i] * g.x[i]; });
  x = pack(exact);
  const Vec kept = unpack(x);
  return pack(each([&](int i) { return exact.x[i] - kept.x[i]; }));
}

// sum (16, 8) += 32 columns of 16 rows times those of 8, in an order of columns that only has to be the same for both:
// a lane has the same 8 of row lane / 4 of low, high and weight.
__device__ __forceinline__ void add_products(float (&sum)[4], uint4 low, uint4 high, uint4 weight) {
  auto mma = [&](u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  };
  mma(low.x, high.x, low.y, high.y, weight.x, weight.y);
  mma(low.z, high.z, low.w, high.w, weight.z, weight.w);
}

// Calls use(row, output, kept, total) for every row of x and each of the 8 outputs, in a thread of their own:
// total(i, w) is the product of the row (as RMSNorm makes it if there is a gain) with row i of weight w; kept is what
// before(row, output) has read meanwhile.
// Block: 32 * warps threads, at least 128; shared memory: a Part per warp.
template <int kWeights, typename Before, typename Use>
__device__ __forceinline__ void products(Rows<kWeights> mine, const bf16* x, const bf16* gain, int rows, int width,
                                         float epsilon, Before before, Use use) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  using Share = Part<kWeights>;
  Share* const parts = (Share*)shared_bytes;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32, step = blockDim.x;
  const int first = 32 * warp + lane % 4 * 8, output = threadIdx.x % kOutputs;
  const bool holds = width <= kHeld * step;  // all of the weight, for all rows
  Share& part = parts[warp];
  auto ask = [&](int begin) {
    #pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int column = begin + i * step;
      #pragma unroll
      for (int w = 0; w < kWeights; ++w) copy_async(part.weight[w][i] + lane, mine.of[w] + column, column < width);
      if (gain && lane < 4) copy_async(part.gain[i] + lane, gain + column, column < width);
    }
  };
  ask(first);
  wait_for_kernel_before();

  for (int row0 = 0; row0 < rows; row0 += kTexts) {
    const int low = row0 + lane / 4, row = row0 + threadIdx.x / kOutputs;
    const bool mine_too = threadIdx.x < kTexts * kOutputs && row < rows;
    decltype(before(0, 0)) kept = {};
    const bf16* const x_low = x + (size_t)low * width;
    float sum[kWeights][4] = {}, squares[2] = {};
    const bool few = rows - row0 <= 8;  // then what rounding took away is multiplied in place of the other 8 rows
    for (int begin = first; begin - first < width; begin += kHeld * step) {
      __syncwarp();  // all lanes have read what was there
      #pragma unroll
      for (int i = 0; i < kHeld; ++i)
        copy_async(part.x[i] + lane, x_low + begin + i * step, low < rows && begin + i * step < width);
      if (mine_too && begin == first) kept = before(row, output);
      if (!holds && (row0 || begin != first)) ask(begin);
      asm volatile("cp.async.wait_all;" ::: "memory");
      __syncwarp();
      #pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int column = begin + i * step;
        uint4 here = part.x[i][lane], high = {}, rest = {}, high_rest = {};
        if (!few) high = read(x_low + 8 * width + column, low + 8 < rows && column < width);
        if (gain) {
          const uint4 g = part.gain[i][lane % 4];
          rest = scale(here, g, squares[0]);
          if (!few) high_rest = scale(high, g, squares[1]);
        }
        #pragma unroll
        for (int w = 0; w < kWeights; ++w) {
          const uint4 weight = part.weight[w][i][lane];
          add_products(sum[w], here, few ? rest : high, weight);
          if (gain && !few) add_products(sum[w], rest, high_rest, weight);
        }
      }
    }
    #pragma unroll
    for (int w = 0; w < kWeights; ++w)
      if (few) sum[w][0] += sum[w][2], sum[w][1] += sum[w][3];
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = lane / 4 + 8 * half;
      squares[half] += __shfl_xor_sync(0xffffffffu, squares[half], 1);
      squares[half] += __shfl_xor_sync(0xffffffffu, squares[half], 2);
      #pragma unroll
      for (int w = 0; w < kWeights; ++w)
        *(float2*)(part.sums[w] + at * kOutputs + lane % 4 * 2) = make_float2(sum[w][2 * half], sum[w][2 * half + 1]);
      if (lane % 4 == 0) part.squares[at] = squares[half];
    }
    __syncthreads();
    auto of_warps = [&](auto share) {
      float all = 0;
      for (int w = 0; w < warps; ++w) all += share(parts[w]);
      return all;
    };
    if (mine_too) {
      const int at = row - row0;
      const float by = gain ? rsqrtf(of_warps([&](Share& p) { return p.squares[at]; }) / width + epsilon) : 1.f;
      use(row, output, kept, [&](int i, int w = 0) {
        return by * of_warps([&](Share& p) { return p.sums[w][at * kOutputs + i]; });
      });
    }
    __syncthreads();  // the shares have been read
  }
}

__device__ __forceinline__ bf16 rounded(float x) { return {(unsigned short)pack(x, 0)}; }
__device__ __forceinline__ void put(float* to, float x) { *to = x; }
__device__ __forceinline__ void put(bf16* to, float x) { *to = rounded(x); }

struct Nothing {};
constexpr auto read_nothing = [](int, int) { return Nothing{}; };

// See layers.decode_qkv. A thread block has 4 planes of a head: grid (heads + 2 * kv_heads) * half / 4, half a multiple
// of 4; positions and rotation may not be written by the kernel before.
extern "C" __global__ void __launch_bounds__(768) decode_qkv(
    bf16* q, bf16* k, bf16* v, const bf16* x, const bf16* gain, const bf16* weight, const float* rotation,
    const int* positions, int rows, int width, int heads, int kv_heads, int half, int capacity, float epsilon) {
  const int slot = blockIdx.x * 4 / half, column0 = blockIdx.x * 4 % half, of_lane = threadIdx.x % 32 / 4;
  auto turn = [&](int row, int output) {
    if (slot >= heads + kv_heads) return make_float2(1, 0);
    const float* const cos = rotation + (size_t)min(positions[row], capacity - 1) * half + column0 + output % 4;
    return make_float2(cos[0], cos[(size_t)capacity * half]);
  };
  const int row_here = threadIdx.x / kOutputs;
  const float2 turn_here = turn(min(row_here, rows - 1), threadIdx.x % kOutputs);  // of the first rows, without waiting
  const size_t mine = (size_t)slot * 2 * half + column0 + of_lane % 4 + of_lane / 4 * half;
  products(Rows<1>{weight + mine * width}, x, gain, rows, width, epsilon,
           [&](int row, int output) { return row == row_here ? turn_here : turn(row, output); },
           [&](int row, int output, float2 turned, auto total) {
    if (output >= 4) return;
    const float a = total(output), b = total(output + 4);
    const bool query = slot < heads;
    bf16* const out = query ? q : slot < heads + kv_heads ? k : v;
    const size_t at = query ? (size_t)row * heads + slot : (size_t)row * kv_heads + (slot - heads) % kv_heads;
    bf16* const to = out + at * 2 * half + column0 + output;
    to[0] = rounded(a * turned.x - b * turned.y);
    to[half] = rounded(b * turned.x + a * turned.y);
  });
}

// The row of the weight that a lane reads where a thread block has 8 of `out` outputs: grid ceil(out / 8), as below.
__device__ __forceinline__ size_t row_of_lane(int out) {
  return min(blockIdx.x * kOutputs + threadIdx.x % 32 / 4, out - 1);
}

// y (rows, out) = residual + x weight^T, of the normalised rows if there is a gain.
extern "C" __global__ void __launch_bounds__(1024) decode_linear(
    bf16* y, const bf16* x, const bf16* gain, const bf16* weight, const bf16* residual, int rows, int width, int out,
    float epsilon) {
  auto at = [&](int row, int output) { return (size_t)row * out + min(blockIdx.x * kOutputs + output, out - 1); };
  products(Rows<1>{weight + row_of_lane(out) * width}, x, gain, rows, width, epsilon,
           [&](int row, int output) { return __uint_as_float((u32)residual[at(row, output)].bits << 16); },
           [&](int row, int output, float kept, auto total) {
    if (blockIdx.x * kOutputs + output < out) y[at(row, output)] = rounded(kept + total(output));
  });
}

// y (rows, hidden) = silu(gate) * up, of the product of the normalised rows with weight (2 * hidden, width). A thread
// block has 8 columns of y: grid ceil(hidden / 8).
extern "C" __global__ void __launch_bounds__(768) decode_swiglu(
    bf16* y, const bf16* x, const bf16* gain, const bf16* weight, int rows, int width, int hidden, float epsilon) {
  const bf16* const gate_row = weight + row_of_lane(hidden) * width;
  products(Rows<2>{gate_row, gate_row + (size_t)hidden * width}, x, gain, rows, width, epsilon, read_nothing,
           [&](int row, int output, Nothing, auto total) {
    const int column = blockIdx.x * kOutputs + output;
    const float gate = total(output, 0);
    if (column < hidden) y[(size_t)row * hidden + column] = rounded(gate * sigmoid(gate) * total(output, 1));
  });
}

template <typename Out>
__device__ __forceinline__ void normal_product(Out* y, const bf16* x, const bf16* gain, const bf16* weight, int rows,
                                               int width, int out, float epsilon) {
  products(Rows<1>{weight + row_of_lane(out) * width}, x, gain, rows, width, epsilon, read_nothing,
           [&](int row, int output, Nothing, auto total) {
    const int column = blockIdx.x * kOutputs + output;
    if (column < out) put(y + (size_t)row * out + column, total(output));
  });
}

// y (rows, out) = the normalised rows times weight^T; of logits in float32.
extern "C" __global__ void __launch_bounds__(1024) decode_product(
    bf16* y, const bf16* x, const bf16* gain, const bf16* weight, int rows, int width, int out, float epsilon) {
  normal_product(y, x, gain, weight, rows, width, out, epsilon);
}
extern "C" __global__ void __launch_bounds__(1024) decode_logits(
    float* y, const bf16* x, const bf16* gain, const bf16* weight, int rows, int width, int out, float epsilon) {
  normal_product(y, x, gain, weight, rows, width, out, epsilon);
}

// See layers.draw. Grid num_texts, block: the vocabulary rounded up to whole warps, at most 1024.
extern "C" __global__ void __launch_bounds__(1024) draw(
    int* tokens, int* written, int* counts, const float* logits, const u32* uniforms, int columns, int vocabulary,
    int end, int capacity, int top_k, float temperature) {
  __shared__ float all[1024], largest_of[32];
  __shared__ u32 sum_of[32];
  const int text = blockIdx.x, token = threadIdx.x, warp = token / 32, lane = token % 32, warps = blockDim.x / 32;
  wait_for_kernel_before();
  const int count = counts[text];
  if (count >= capacity) return;
  const float x = token < vocabulary ? logits[(size_t)text * columns + token] : __int_as_float(0xff800000);
  all[token] = x;
  const float largest_here = warp_max(x);
  if (lane == 0) largest_of[warp] = largest_here;
  __syncthreads();
  float largest = largest_of[0];
  for (int w = 1; w < warps; ++w) largest = fmaxf(largest, largest_of[w]);
  int likelier = 0;
  if (top_k < vocabulary)
    for (int i = 0; i < vocabulary; ++i) likelier += all[i] > x || (all[i] == x && i < token);

  const bool counts_in = token < vocabulary && likelier < top_k;
  u32 sum = counts_in ? __float2uint_rn(0x1p22f * __expf((x - largest) / temperature)) : 0;
  #pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const u32 before = __shfl_up_sync(0xffffffffu, sum, i);
    if (lane >= i) sum += before;
  }
  if (lane == 31) sum_of[warp] = sum;
  __syncthreads();
  u32 total = 0;
  for (int w = 0; w < warps; ++w) {
    if (w < warp) sum += sum_of[w];
    total += sum_of[w];
  }
  const size_t at = (size_t)text * capacity + count;
  const u32 target = (unsigned long long)uniforms[at] * total >> 32;
  const int drawn = __syncthreads_count(sum <= target);
  if (token) return;
  const bool over = count > 0 && tokens[text] == end;
  tokens[text] = written[at] = over ? end : min(drawn, vocabulary - 1);  // of NaN alone, the last token
  counts[text] = count + 1;
}
