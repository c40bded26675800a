#pragma once
#include <atomic>
#include <cstdint>

namespace parka {

// How many collectives a rank has entered and left.
struct CollectiveCounts {
  uint64_t reached = 0;   // entered
  uint64_t finished = 0;  // left again

  bool operator==(const CollectiveCounts&) const = default;
};

// Counts the collectives in which the host takes part. Written by one thread, read by any.
class CollectiveCounter {
 public:
  // The rank is in a collective as long as this lives.
  class Span {
   public:
    explicit Span(CollectiveCounter& counter) : counter_(counter) { counter_.reached_.fetch_add(1); }
    ~Span() { counter_.finished_.fetch_add(1); }
    Span& operator=(Span&&) = delete;

   private:
    CollectiveCounter& counter_;
  };

  CollectiveCounts counts() const {
    const uint64_t finished = finished_.load();  // read first, so that it is never larger than `reached`
    return {reached_.load(), finished};
  }

 private:
  std::atomic<uint64_t> reached_{0}, finished_{0};
};

}  // namespace parka
