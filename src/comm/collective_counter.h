#pragma once
#include <atomic>
#include <cstdint>

namespace parka {

// How far a rank has come in its collectives.
struct CollectiveCounts {
  uint64_t reached = 0;   // it takes part in, or is done with
  uint64_t finished = 0;  // of them

  bool operator==(const CollectiveCounts&) const = default;
};

// Counts the collectives in which the host takes part. Written by one thread, read by any.
class CollectiveCounter {
 public:
  // While it lives, the rank is in a collective.
  class Span {
   public:
    explicit Span(CollectiveCounter& counter) : counter_(counter) { counter_.reached_.fetch_add(1); }
    ~Span() { counter_.finished_.fetch_add(1); }
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;

   private:
    CollectiveCounter& counter_;
  };

  CollectiveCounts counts() const {
    const uint64_t finished = finished_.load();  // first: it must not be seen ahead of `reached`
    return {reached_.load(), finished};
  }

 private:
  std::atomic<uint64_t> reached_{0}, finished_{0};
};

}  // namespace parka
