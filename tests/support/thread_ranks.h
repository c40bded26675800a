#pragma once
#include <barrier>
#include <cmath>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "core/number_formats.h"

// Ranks as threads of a test, on CPU devices: what a rank gives is read by the others where it lies.
namespace parka::test {

class ThreadRanks {
 public:
  explicit ThreadRanks(int size) : size_(size), barrier_(size), given_(static_cast<size_t>(size)) {}

  // Runs `body` on every rank; rethrows the first failure. A body that throws must do so on all ranks.
  void run(const std::function<void(Communicator&)>& body) {
    std::vector<std::exception_ptr> failures(static_cast<size_t>(size_));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size_; ++rank) {
      threads.emplace_back([&, rank] {
        Rank communicator(*this, rank);
        try {
          body(communicator);
        } catch (...) {
          failures[static_cast<size_t>(rank)] = std::current_exception();
          barrier_.arrive_and_drop();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& failure : failures) {
      if (failure) std::rethrow_exception(failure);
    }
  }

 private:
  struct Given {
    TensorView tensor;
    std::string text;
  };

  class Rank final : public Communicator {
   public:
    Rank(ThreadRanks& ranks, int rank) : ranks_(ranks), rank_(rank) {}
    int rank() const override { return rank_; }
    int size() const override { return ranks_.size_; }
    std::string description() const override { return "threads"; }

    void all_reduce(Device&, const TensorView& x, Reduction reduction, Peers peers) override {
      const std::vector<float> result = reduced(x, 0, x.numel(), reduction, peers);
      ranks_.barrier_.arrive_and_wait();  // all have read
      write(x, result);
      finish();
    }
    void reduce_scatter(Device&, const TensorView& in, const TensorView& out, Peers peers,
                        Accumulation accumulation) override {
      PARKA_REQUIRE(in.numel() == out.numel() * size_of(peers));
      std::vector<float> result = reduced(in, place_in(peers) * out.numel(), out.numel(), Reduction::kSum, peers);
      for (size_t i = 0; i < result.size() && accumulation == Accumulation::kContinue; ++i) {
        result[i] += read(out, static_cast<int64_t>(i));
      }
      ranks_.barrier_.arrive_and_wait();
      write(out, result);
      finish();
    }
    void all_gather(Device&, const TensorView& in, const TensorView& out, Peers peers) override {
      PARKA_REQUIRE(out.bytes() == in.bytes() * size_of(peers));
      give(in);
      for (int place = 0; place < size_of(peers); ++place) {
        auto* const target = static_cast<std::byte*>(out.data) + place * in.bytes();
        const void* const source = given(peers, place).data;
        if (target != source) std::memmove(target, source, static_cast<size_t>(in.bytes()));
      }
      finish();
    }
    void all_gather_columns(Device&, const TensorView& in, const TensorView& out, Peers peers) override {
      const int size = size_of(peers);
      check_side_by_side(out, in, size);
      give(in);
      const auto row_bytes = static_cast<size_t>(in.bytes() / in.dim[0]);
      for (int64_t i = 0; i < in.dim[0] * size; ++i) {
        const auto* const source = static_cast<const std::byte*>(given(peers, static_cast<int>(i % size)).data);
        std::memcpy(static_cast<std::byte*>(out.data) + static_cast<size_t>(i) * row_bytes,
                    source + static_cast<size_t>(i / size) * row_bytes, row_bytes);
      }
      finish();
    }
    void all_to_all(Device&, const TensorView& in, const TensorView& out, Peers peers) override {
      const int size = size_of(peers), own = place_in(peers);
      check_exchanged(in, out, size);
      give(in);
      const int64_t bytes = in.bytes() / in.dim[0] / size;
      for (int64_t i = 0; i < in.dim[0] * size; ++i) {
        const auto* const source = static_cast<const std::byte*>(given(peers, static_cast<int>(i % size)).data);
        std::memcpy(static_cast<std::byte*>(out.data) + i * bytes, source + (i / size * size + own) * bytes,
                    static_cast<size_t>(bytes));
      }
      finish();
    }
    uint64_t last_queued() const override { return last_; }
    void wait(Device&, uint64_t number) override { PARKA_REQUIRE(number <= last_); }

    std::vector<std::string> gather_text(const std::string& text) override {
      ranks_.given_[static_cast<size_t>(rank_)].text = text;
      ranks_.barrier_.arrive_and_wait();
      std::vector<std::string> all;
      for (const Given& given : ranks_.given_) all.push_back(given.text);
      ranks_.barrier_.arrive_and_wait();
      return all;
    }

   private:
    void give(const TensorView& x) {
      ranks_.given_[static_cast<size_t>(rank_)].tensor = x;
      ranks_.barrier_.arrive_and_wait();
    }
    void finish() {
      ++last_;
      ranks_.barrier_.arrive_and_wait();
    }
    static float read(const TensorView& x, int64_t i) {
      return x.dtype == DType::kF32 ? x.as<float>()[i] : decode_bf16(x.as<BFloat16>()[i]);
    }
    static void write(const TensorView& x, const std::vector<float>& values) {
      for (int64_t i = 0; i < x.numel(); ++i) {
        const float value = values[static_cast<size_t>(i)];
        if (x.dtype == DType::kF32) {
          x.as<float>()[i] = value;
        } else {
          x.as<BFloat16>()[i] = encode_bf16(value);
        }
      }
    }
    const TensorView& given(Peers peers, int place) const {
      return ranks_.given_[static_cast<size_t>(rank_at(peers, place))].tensor;
    }
    std::vector<float> reduced(const TensorView& x, int64_t begin, int64_t count, Reduction reduction,
                               Peers peers) {
      give(x);
      std::vector<float> result(static_cast<size_t>(count));
      for (int64_t i = 0; i < count; ++i) {
        float value = read(given(peers, 0), begin + i);
        for (int place = 1; place < size_of(peers); ++place) {
          const float other = read(given(peers, place), begin + i);
          value = reduction == Reduction::kSum ? value + other : std::max(value, other);
        }
        result[static_cast<size_t>(i)] = value;
      }
      return result;
    }

    ThreadRanks& ranks_;
    const int rank_;
    uint64_t last_ = 0;
  };

  const int size_;
  std::barrier<> barrier_;
  std::vector<Given> given_;
};

}  // namespace parka::test
