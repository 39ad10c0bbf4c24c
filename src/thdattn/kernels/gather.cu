// Keys and values of all ranks, gathered and moved to sequence order by one kernel, for calls that have nothing else to
// do meanwhile. No copy engine is started and no flag awaited between launches, which takes 10 us each.

// Flags of one rank in the memory of another one: 1, or 0 once they were awaited. ready, taken: see comm/windows.py;
// offered: of each chunk of its rows.
struct RankFlags { u32 ready[16], taken[16], offered[kChunks]; };
CHECK_RankFlags;

// Where this rank meets the others. theirs: its flags in the memory of each; mine: those of all ranks in its own;
// counts: of the blocks that have offered and that have collected, 0 between calls; takes: whether nobody reads the
// ranks' parts after this kernel.
struct Meeting { RankFlags *theirs[kMaxRanks], *mine; u32* counts; int rank, num_ranks, takes; };
CHECK_Meeting;

__device__ __forceinline__ void put(u32* flag, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(flag), "r"(value) : "memory");
}
__device__ __forceinline__ void wait_for(const u32* flag) {
  u32 found;
  do asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(flag) : "memory"); while (found != 1);
}

// Whether as many have come here with this call. Asked by one thread of each, after what it did.
__device__ __forceinline__ bool is_last(u32* count, int of) {
  __threadfence();
  if (atomicAdd(count, 1) != of - 1) return false;
  *count = 0;
  __threadfence();
  return true;
}

// Keys and values of row `row` of all ranks' rows to their place in sequence order, from where `k` and `v` point.
__device__ __forceinline__ void place_row(const Rows& keys, const Rows& values, const uint4* k, const uint4* v, int row,
                                          const int* rank_order, const int2* query_ranges) {
  const int place = rank_order[row];
  if (place < 0) return;
  const bool zero = is_empty(query_ranges[place]);
  move_row(keys.out + (size_t)place * keys.words, k, keys.words, zero);
  move_row(values.out + (size_t)place * values.words, v, values.words, zero);
}

// Which rows warps move: chunks of so many, one after another; every rank has the same.
struct Chunks {
  int num_rows, each, count;
  __device__ __forceinline__ explicit Chunks(int num_rows)
      : num_rows(num_rows), each((num_rows + kChunks - 1) / kChunks), count((num_rows + each - 1) / each) {}
  __device__ __forceinline__ int begin(int chunk) const { return chunk * each; }
  __device__ __forceinline__ int end(int chunk) const { return min(num_rows, (chunk + 1) * each); }
};

// Warps copy this rank's rows, `pitch` words each, to memory that all others see, chunk by chunk, and then put the
// first `words` of each to their place.
__device__ __forceinline__ void offer(const Rows& keys, const Rows& values, const Meeting& meeting,
                                      const int* rank_order, const int2* query_ranges, Chunks chunks, int warp,
                                      int warps) {
  const int lane = threadIdx.x % kWarp;
  if (warp >= chunks.count) return;
  if (lane < meeting.num_ranks) wait_for(meeting.mine[lane].taken);
  __syncwarp();
  // Nobody can say again that a part is taken before all chunks were offered.
  if (lane == 0 && is_last(&meeting.counts[0], min(warps, chunks.count)))
    for (int rank = 0; rank < meeting.num_ranks; ++rank) meeting.mine[rank].taken[0] = 0;
  for (int chunk = warp; chunk < chunks.count; chunk += warps) {
    for (size_t row = chunks.begin(chunk); row < chunks.end(chunk); ++row) {
      move_row((uint4*)keys.from[meeting.rank] + row * keys.pitch, keys.own + row * keys.own_pitch, keys.pitch, false);
      move_row((uint4*)values.from[meeting.rank] + row * values.pitch, values.own + row * values.own_pitch,
               values.pitch, false);
    }
    __syncwarp();
    if (lane < meeting.num_ranks && lane != meeting.rank) put(&meeting.theirs[lane]->offered[chunk], 1);
  }
  for (int chunk = warp; chunk < chunks.count; chunk += warps)
    for (size_t row = chunks.begin(chunk); row < chunks.end(chunk); ++row)
      place_row(keys, values, keys.own + row * keys.own_pitch, values.own + row * values.own_pitch,
                meeting.rank * chunks.num_rows + row, rank_order, query_ranges);
}

// Warps put the rows of all other ranks to their places, as they are offered.
__device__ __forceinline__ void collect(const Rows& keys, const Rows& values, const Meeting& meeting,
                                        const int* rank_order, const int2* query_ranges, Chunks chunks, int warp,
                                        int warps) {
  for (int chunk = warp; chunk < chunks.count; chunk += warps)
    for (int next = 1; next < meeting.num_ranks; ++next) {             // each rank begins with another one
      const int rank = (meeting.rank + next) % meeting.num_ranks;
      if (threadIdx.x % kWarp == 0) {
        wait_for(&meeting.mine[rank].offered[chunk]);
        meeting.mine[rank].offered[chunk] = 0;
      }
      __syncwarp();
      for (size_t row = chunks.begin(chunk); row < chunks.end(chunk); ++row)
        place_row(keys, values, keys.from[rank] + row * keys.pitch, values.from[rank] + row * values.pitch,
                  rank * chunks.num_rows + row, rank_order, query_ranges);
    }
}

// Rows as those of thd_reorder<false>, of which `from` has one part for every rank, this one's among them: there it
// offers what is at `own`, num_rows rows, at least one, all `pitch` words of them. rank_order (num_ranks * num_rows).
// Blocks of even numbers offer, those of odd numbers collect: a block waits only for one of other ranks whose number
// is less than its own, so that all come to an end wherever blocks start in the order of their numbers. Bound by the
// links.
//
// marks: two numbers of the watchdog, the first one written at the beginning and the second one at the end; null: none
// Launch: grid (any even number, the same on all ranks), block 512.
__global__ void __launch_bounds__(512) thd_gather(
    const __grid_constant__ Rows keys, const __grid_constant__ Rows values, const __grid_constant__ Meeting meeting,
    const int* __restrict__ rank_order, const int2* __restrict__ query_ranges, int num_rows, u32* marks, u32 number) {
  const int warp = (blockIdx.x / 2 * blockDim.x + threadIdx.x) / kWarp, warps = gridDim.x / 2 * (blockDim.x / kWarp);
  if (blockIdx.x % 2 == 0) {
    if (blockIdx.x == 0 && threadIdx.x == 0 && marks) put(marks, number);
    offer(keys, values, meeting, rank_order, query_ranges, Chunks(num_rows), warp, warps);
    return;
  }
  collect(keys, values, meeting, rank_order, query_ranges, Chunks(num_rows), warp, warps);
  __syncthreads();
  if (threadIdx.x != 0 || !is_last(&meeting.counts[1], gridDim.x / 2)) return;
  for (int rank = 0; rank < meeting.num_ranks && meeting.takes; ++rank) put(meeting.theirs[rank]->taken, 1);
  if (marks) put(marks + 1, number);
}
