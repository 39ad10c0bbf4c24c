// What ranks have for each other, offered, awaited and put to its places by one kernel, for calls that have nothing
// else to do meanwhile. No copy engine is started and no flag awaited between launches, which takes 10 us each.
//
// A payload is what travels: `count` chunks of what every rank has for every other one, at least one and as many on all
// ranks. A warp writes a chunk to where other ranks read it (`offer`), or puts one of a rank, this one's own too, to
// its place (`place`). Where others read is their own memory, unless they read again later what is offered: a GPU
// writes into another one's memory without waiting for answers, which it does where it reads there.
//
// A rank may write there once all ranks, not only the one whose memory it is, have said that they have taken what was
// there before: each says so when it reads nothing of that turn any more, in nobody's memory.

#pragma once

#include "kernels.cu"

// Flags of one rank in the memory of another one: 1, or 0 once they were awaited. ready, taken: see comm/windows.py;
// offered: of each of its chunks.
struct RankFlags { u32 ready[16], taken[16], offered[kChunks]; };
CHECK_RankFlags;

// Where this rank meets the others. theirs: its flags in the memory of each; mine: those of all ranks in its own;
// counts: of the blocks that may offer and of those that are done, 0 between calls; takes: whether this rank reads
// nothing of what was offered after this kernel.
struct PeerExchange { RankFlags *theirs[kMaxRanks], *mine; u32* counts; int rank, num_ranks, takes; };
CHECK_PeerExchange;

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

// ------------------------------------------------------------------------------------------------ keys of all ranks

// Rows as those of thd_reorder<false>, of which `from` has one part for every other rank. What is at `own`, num_rows
// rows, at least one, all `pitch` words of them, is offered at one place for each rank, or at one for all: the others
// are null. rank_order (num_ranks * num_rows).
struct AllGather {
  Rows keys, values;
  uint4* to[2][kMaxRanks];                                             // of keys, of values
  const int* rank_order;
  const int2* query_ranges;
  int num_rows;

  // A chunk is so many rows one after another.
  __device__ __forceinline__ int each() const { return (num_rows + kChunks - 1) / kChunks; }
  __device__ __forceinline__ int count() const { return (num_rows + each() - 1) / each(); }
  __device__ __forceinline__ int begin(int chunk) const { return chunk * each(); }
  __device__ __forceinline__ int end(int chunk) const { return min(num_rows, (chunk + 1) * each()); }

  __device__ __forceinline__ void offer(const PeerExchange& exchange, int chunk) const {
    for (int next = 1; next <= exchange.num_ranks; ++next) {            // each rank begins with another one
      const int rank = (exchange.rank + next) % exchange.num_ranks;
      if (!to[0][rank]) continue;
      for (size_t row = begin(chunk); row < end(chunk); ++row) {
        move_row(to[0][rank] + row * keys.pitch, keys.own + row * keys.own_pitch, keys.pitch, false);
        move_row(to[1][rank] + row * values.pitch, values.own + row * values.own_pitch, values.pitch, false);
      }
    }
  }

  // The first `words` of each row to its place in sequence order.
  __device__ __forceinline__ void place(const PeerExchange& exchange, int rank, int chunk) const {
    const bool own = rank == exchange.rank;
    const uint4 *const k = own ? keys.own : keys.from[rank], *const v = own ? values.own : values.from[rank];
    const int k_pitch = own ? keys.own_pitch : keys.pitch, v_pitch = own ? values.own_pitch : values.pitch;
    for (size_t row = begin(chunk); row < end(chunk); ++row) {
      const int to = rank_order[rank * num_rows + row];
      if (to < 0) continue;
      const bool zero = is_empty(query_ranges[to]);
      move_row(keys.out + (size_t)to * keys.words, k + row * k_pitch, keys.words, zero);
      move_row(values.out + (size_t)to * values.words, v + row * v_pitch, values.words, zero);
    }
  }
};
CHECK_AllGather;

// ------------------------------------------------------------------------------------------------ slices for each rank

constexpr int kMaxSlices = 6;
CHECK_kMaxSlices;
constexpr u32 kLine = 128;                                             // bytes; chunks begin at multiples of so many

// What an array has for each rank, or gets from it: `rows` times so many words, one every `pitch`.
template <typename Word> struct SliceSpec {
  Word* of[kMaxRanks];
  int words[kMaxRanks], rows, pitch;

  __device__ __forceinline__ u32 size(int rank) const { return (u32)rows * words[rank]; }
};
CHECK_SliceSpec;

// The words of a slice for one rank, by number: less than 2^31 of them, at least one. A product takes the place of a
// division: it is rounded down, at most by one too much.
template <typename Word> struct Words {
  Word* begin;
  u32 words, inverse;
  size_t pitch;
  __device__ __forceinline__ Words(const SliceSpec<Word>& slice, int rank)
      : begin(slice.of[rank]), words(slice.words[rank]), inverse(0xffffffffu / words), pitch(slice.pitch) {}
  __device__ __forceinline__ Word* operator()(u32 i) const {
    const u32 guess = __umulhi(i, inverse), rest = i - guess * words;
    const bool next = rest >= words;
    return begin + (guess + next) * pitch + (next ? rest - words : rest);
  }
};

// A warp copies the words [begin, end), four a lane at a time, from and to where two functions say that they are.
template <typename Word, typename From, typename To>
__device__ __forceinline__ void move_words(u32 begin, u32 end, From from, To to) {
  for (u32 i = begin + threadIdx.x % kWarp; i < end; i += 4 * kWarp) {
    Word x[4];
    #pragma unroll
    for (int n = 0; n < 4; ++n) {
      const Word* const at = from(i + n * kWarp);
      if (i + n * kWarp < end) x[n] = *at;
    }
    #pragma unroll
    for (int n = 0; n < 4; ++n) {
      Word* const at = to(i + n * kWarp);
      if (i + n * kWarp < end) *at = x[n];
    }
  }
}

// Every rank's slices of some arrays, and where those of all ranks come to. A message, what one rank has for another,
// is its slices of all arrays, one behind another: this rank's to each rank begins at `to`, in the memory of that one,
// and that of each rank at `from`, in its own. What this rank has for itself goes to its place at once.
//
// Words may be narrower on one of two ranks: chunks are of the same bytes.
template <typename Word> struct AllToAll {
  SliceSpec<Word> out[kMaxSlices], in[kMaxSlices];
  Word *to[kMaxRanks], *from[kMaxRanks];
  int num_slices, num_chunks;

  __device__ __forceinline__ int count() const { return num_chunks; }

  // Calls move(c, first, last, begin) for each array of which the chunk of a message has words: array c, the words
  // [first, last) of its slice, which begins at this word of the message.
  template <typename Move>
  __device__ __forceinline__ void each(const SliceSpec<Word>* slices, int rank, int chunk, Move move) const {
    u32 total = 0;
    for (int c = 0; c < num_slices; ++c) total += slices[c].size(rank);
    constexpr u32 kWords = kLine / sizeof(Word);
    const u32 each = ((total + kWords - 1) / kWords + num_chunks - 1) / num_chunks * kWords;
    const u32 first = min(chunk * each, total), last = min(first + each, total);
    u32 begin = 0;
    for (int c = 0; c < num_slices; ++c) {
      const u32 end = begin + slices[c].size(rank), from_here = max(first, begin), to_here = min(last, end);
      if (from_here < to_here) move(c, from_here - begin, to_here - begin, begin);
      begin = end;
    }
  }

  __device__ __forceinline__ void offer(const PeerExchange& exchange, int chunk) const {
    for (int next = 1; next < exchange.num_ranks; ++next) {
      const int rank = (exchange.rank + next) % exchange.num_ranks;
      each(out, rank, chunk, [&](int c, u32 first, u32 last, u32 begin) {
        Word* const message = to[rank] + begin;
        move_words<Word>(first, last, Words<Word>(out[c], rank), [=](u32 i) { return message + i; });
      });
    }
  }

  __device__ __forceinline__ void place(const PeerExchange& exchange, int rank, int chunk) const {
    each(in, rank, chunk, [&](int c, u32 first, u32 last, u32 begin) {
      const Words<Word> places(in[c], rank);
      Word* const message = from[rank] + begin;
      if (rank == exchange.rank) move_words<Word>(first, last, Words<Word>(out[c], rank), places);
      else move_words<Word>(first, last, [=](u32 i) { return message + i; }, places);
    });
  }
};
CHECK_AllToAll;

// ------------------------------------------------------------------------------------------------ the kernel

// Warps offer this rank's chunks.
template <typename Payload>
__device__ __forceinline__ void offer_all(const Payload& payload, const PeerExchange& exchange, int count, int warp, int warps) {
  const int lane = threadIdx.x % kWarp, per_block = blockDim.x / kWarp;
  if (warp / per_block * per_block >= count) return;                   // no warp of this block has a chunk
  if (threadIdx.x < exchange.num_ranks) wait_for(exchange.mine[threadIdx.x].taken);
  __syncthreads();
  // Nobody says again that it has taken all before all chunks were offered, and the first warp of every block that
  // counts has one.
  if (threadIdx.x == 0 && is_last(&exchange.counts[0], (min(warps, count) + per_block - 1) / per_block))
    for (int rank = 0; rank < exchange.num_ranks; ++rank) exchange.mine[rank].taken[0] = 0;
  for (int chunk = warp; chunk < count; chunk += warps) {
    payload.offer(exchange, chunk);
    __syncwarp();                                                      // the flag comes behind what all lanes wrote
    if (lane < exchange.num_ranks && lane != exchange.rank) put(&exchange.theirs[lane]->offered[chunk], 1);
  }
}

// Warps put the chunks of all ranks to their places: first those of this one, while others' are on their way, then
// those, as they are offered.
template <typename Payload>
__device__ __forceinline__ void collect_all(const Payload& payload, const PeerExchange& exchange, int count, int warp,
                                            int warps) {
  for (int chunk = warp; chunk < count; chunk += warps) payload.place(exchange, exchange.rank, chunk);
  for (int chunk = warp; chunk < count; chunk += warps)
    for (int next = 1; next < exchange.num_ranks; ++next) {             // each rank begins with another one
      const int rank = (exchange.rank + next) % exchange.num_ranks;
      if (threadIdx.x % kWarp == 0) {
        wait_for(&exchange.mine[rank].offered[chunk]);
        exchange.mine[rank].offered[chunk] = 0;
      }
      __syncwarp();                                                    // all lanes read behind the flag
      payload.place(exchange, rank, chunk);
    }
}

// All ranks call it with cargoes of one kind. Blocks of even numbers offer, those of odd numbers collect: a block waits
// only for one of other ranks whose number is less than its own, so that all come to an end wherever blocks start in
// the order of their numbers. Bound by the links.
//
// marks: two numbers of the watchdog, the first one written at the beginning and the second one at the end; null: none
// Launch: grid (any even number, the same on all ranks), block 512.
template <typename Payload>
__global__ void __launch_bounds__(512, 2) thd_peer_exchange(
    const __grid_constant__ Payload payload, const __grid_constant__ PeerExchange exchange, u32* marks, u32 number) {
  const int warp = (blockIdx.x / 2 * blockDim.x + threadIdx.x) / kWarp, warps = gridDim.x / 2 * (blockDim.x / kWarp);
  const int count = payload.count();
  if (blockIdx.x % 2 == 0) {
    if (blockIdx.x == 0 && threadIdx.x == 0 && marks) put(marks, number);
    offer_all(payload, exchange, count, warp, warps);
  } else {
    collect_all(payload, exchange, count, warp, warps);
  }
  __syncthreads();
  if (!__syncthreads_or(threadIdx.x == 0 && is_last(&exchange.counts[1], gridDim.x))) return;
  if (threadIdx.x < exchange.num_ranks && exchange.takes) put(exchange.theirs[threadIdx.x]->taken, 1);
  if (threadIdx.x == 0 && marks) put(marks + 1, number);
}
