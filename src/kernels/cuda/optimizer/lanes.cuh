#pragma once
#include <bit>
#include <cstdint>

#include "core/host_device.h"
#include "kernels/cuda/vector.cuh"
#include "kernels/ops/optimizer/adamw.h"

// How the optimizers' kernels read and write tensors of N elements.
//
//   group       128 neighbours, which share the scale of an FP8 moment. A warp takes one group, or several.
//   x_N         points to the first element that a lane has: move() goes there, and on by multiples of 128
//   part        a lane's kCount elements, in packs of kElements neighbours. The kLanes lanes of a group have
//               packs side by side, so that a warp moves whole sectors: lane 0, lane 1, .. lane 0, lane 1, ..
//   x[e]        the number e of a part, e < kCount, pack by pack
//   StoredPart  a part as it is in memory; floats are made of it late, so that many loads are under way at once
namespace parka::cuda {

template <int kPacks_, int kElements_, int kWarps>
struct PartShape {
  static constexpr int kPacks = kPacks_, kElements = kElements_, kCount = kPacks * kElements;
  static constexpr int kLanes = static_cast<int>(kMomentGroup) / kCount;  // of a group
  static constexpr int kPackStride = kLanes * kElements;
  static constexpr int kThreads = kWarps * kWarpSize;  // of a block
  static constexpr int kBlockElements = kThreads * kCount;
  static_assert(kWarpSize % kLanes == 0);

  static __device__ uint32_t lane() { return threadIdx.x % kLanes; }
  // From the block's first element to the lane's.
  static __device__ uint32_t offset() {
    return threadIdx.x / kLanes * static_cast<uint32_t>(kMomentGroup) + lane() * kElements;
  }
  // From the lane's first element to its number e.
  static constexpr int at(int e) { return e / kElements * kPackStride + e % kElements; }
};
// Many lanes for each group, or few with wide accesses, which makes a group's own work cost less.
using SmallShape = PartShape<1, 4, 8>;
using LargeShape = PartShape<2, 8, 16>;

// kWhole: all packs are full, in aligned tensors. Otherwise elements past a tensor's end are read as 0.
template <typename Shape_, bool kWhole_>
struct Part : Shape_ {
  using Shape = Shape_;
  static constexpr bool kWhole = kWhole_;
  int64_t left = 0;  // unless kWhole, elements of the tensor from the lane's first one on; may be negative

  __device__ bool has_group() const { return left + Shape::lane() * Shape::kElements > 0; }
  __device__ int count(int pack) const {
    const int64_t here = left - pack * Shape::kPackStride;
    return here >= Shape::kElements ? Shape::kElements : here > 0 ? static_cast<int>(here) : 0;
  }
};
template <typename Shape>
using WholePart = Part<Shape, true>;

// Calls f(part, first) with the lane's part of a tensor of N elements and the number of its first one.
template <typename Shape, typename F>
__device__ void with_part(int64_t N, bool aligned, const F& f) {
  const int64_t begin = int64_t{blockIdx.x} * Shape::kBlockElements, first = begin + Shape::offset();
  const Part<Shape, false> part{{}, N - first};
  if (aligned && begin + Shape::kBlockElements <= N) {
    f(WholePart<Shape>{}, first);
  } else {
    f(part, first);
  }
}

// `tensors` at the lane's first element of a block of elements.
template <typename Shape, typename Tensors>
__device__ Tensors at_block(const Tensors& tensors, int block) {
  Tensors moved = tensors;
  moved.move(int64_t{block} * Shape::kBlockElements + Shape::offset());
  return moved;
}

// Calls f(e) for each element of a part, pack by pack.
template <typename Shape, typename F>
__device__ void for_each_element(const F& f) {
  for_each<Shape::kPacks>(
      [&](int pack) { for_each<Shape::kElements>([&](int i) { f(pack * Shape::kElements + i); }); });
}

// A part as it is in memory, pack by pack, and its words in a row.
template <typename T, typename Shape_>
struct StoredPart {
  using Shape = Shape_;
  using OfPack = Stored<T, Shape::kElements>;
  static constexpr int kWords = Shape::kPacks * OfPack::kWords;
  OfPack pack[Shape::kPacks];

  __device__ uint32_t& word(int w) { return pack[w / OfPack::kWords].word[w % OfPack::kWords]; }
  __device__ uint32_t word(int w) const { return pack[w / OfPack::kWords].word[w % OfPack::kWords]; }
  __device__ float operator[](int e) const { return pack[e / Shape::kElements][e % Shape::kElements]; }
};

template <typename T, typename Part>
__device__ auto load_part(const T* p, const Part& part) {
  StoredPart<T, typename Part::Shape> x;
#pragma unroll
  for (int pack = 0; pack < Part::kPacks; ++pack) {
    if constexpr (Part::kWhole) {
      x.pack[pack] = load_stored<Part::kElements>(p + pack * Part::kPackStride);
    } else {
      Pack<T, Part::kElements> elements{};
      for_each<Part::kElements>([&](int i) {
        if (i < part.count(pack)) elements.element[i] = p[pack * Part::kPackStride + i];
      });
      x.pack[pack] = std::bit_cast<Stored<T, Part::kElements>>(elements);
    }
  }
  return x;
}

template <typename T, typename Part>
__device__ void store_part(T* p, const Part& part, const StoredPart<T, typename Part::Shape>& x) {
  using Words = Pack<uint32_t, Stored<T, Part::kElements>::kWords>;
  for_each<Part::kPacks>([&](int pack) {
    T* const first = p + pack * Part::kPackStride;
    if constexpr (Part::kWhole) {
      *reinterpret_cast<Words*>(first) = std::bit_cast<Words>(x.pack[pack]);
    } else {
      const auto elements = std::bit_cast<Pack<T, Part::kElements>>(x.pack[pack]);
      for_each<Part::kElements>([&](int i) {
        if (i < part.count(pack)) first[i] = elements.element[i];
      });
    }
  });
}

template <typename Stored>
__device__ void to_floats(const Stored& stored, float (&x)[Stored::Shape::kCount]) {
  for_each<Stored::Shape::kCount>([&](int e) { x[e] = stored[e]; });
}

template <typename T, typename Shape>
__device__ StoredPart<T, Shape> to_stored(const float (&x)[Shape::kCount]) {
  StoredPart<T, Shape> stored;
  for_each<Shape::kPacks>([&](int pack) {
    Pack<T, Shape::kElements> elements;
    for_each<Shape::kElements>([&](int i) { elements.element[i] = from_float<T>(x[pack * Shape::kElements + i]); });
    stored.pack[pack] = std::bit_cast<Stored<T, Shape::kElements>>(elements);
  });
  return stored;
}

// A tensor of numbers as they are: gradients, moments and weights of fp32 or bf16. Other formats have these members
// too: load() what is stored, as to_floats() takes it, and store() floats.
template <typename T>
struct PlainTensor {
  using Type = T;
  T* x_N;

  PARKA_HOST_DEVICE void move(int64_t elements) { x_N += elements; }
  template <typename Part>
  __device__ auto load(const Part& part) const {
    return load_part(x_N, part);
  }
  template <typename Part>
  __device__ auto store(const Part& part, const float (&x)[Part::kCount]) const {
    const auto stored = to_stored<T, typename Part::Shape>(x);
    store_part(x_N, part, stored);
    return stored;
  }
};

}  // namespace parka::cuda
