#include "kernels/ops/optimizer/muon.h"

#include <functional>
#include <limits>

#include "tests/kernels/moment_fixtures.h"
#include "tests/kernels/op_bounds.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();
const std::vector<MomentStorage> kMomentStorages = {
    {DType::kF32}, {DType::kBF16}, {DType::kE4M3, false}, {DType::kE4M3, true}};

// ---- Momentum ----

// The momentum of a tensor, with the direction of its latest step.
struct TestMomentum {
  TestMoment momentum;
  TestTensor direction;

  TestMomentum(Device& device, const MomentStorage& storage, int64_t N)
      : momentum(device, storage, N, true), direction(device, DType::kBF16, {N}), device_(device) {}

  void step_range(const TestTensor& gradient, int64_t begin, int64_t end, float grad_scale = 1, double mu = 0.95) {
    const TestTensor scale(device_, DType::kF32, {1}, {grad_scale});
    muon_momentum(device_, {.gradient = gradient.view().rows(begin, end - begin),
                            .momentum = momentum.range(begin, end),
                            .mu = mu,
                            .grad_scale = scale,
                            .direction = direction.view().rows(begin, end - begin)});
  }
  void step(DType dtype, const std::vector<float>& gradient, float grad_scale = 1, double mu = 0.95) {
    const auto N = static_cast<int64_t>(gradient.size());
    step_range(TestTensor(device_, dtype, {N}, gradient), 0, N, grad_scale, mu);
  }
  bool same_bits(const TestMomentum& other) const {
    return momentum.same_bits(other.momentum) && direction.bytes() == other.direction.bytes();
  }
  bool guard_intact() const { return momentum.guard_intact() && direction.guard_intact(); }

 private:
  Device& device_;
};

// ---- Matrices ----

struct Shape {
  int64_t count, m, n;
  int64_t numel() const { return m * n; }
};

// Square, wide, tall, of one row or column, and of random sizes.
std::vector<Shape> all_shapes() {
  std::vector<Shape> shapes = {{1, 1, 1},   {2, 1, 50},  {2, 50, 1}, {3, 32, 32},
                               {2, 24, 64}, {2, 64, 24}, {1, 33, 57}};
  for (uint64_t i = 0; i < 6; ++i) {
    const auto random = philox4x32(31, 0, i);
    shapes.push_back({1 + random[0] % 3, 1 + random[1] % 70, 1 + random[2] % 70});
  }
  return shapes;
}

// What becomes of `values`, matrices one behind the other.
std::vector<float> orthogonalized(Device& device, const Shape& s, const std::vector<float>& values,
                                  std::span<const NewtonSchulzStep> steps, float safety = 1,
                                  bool in_halves = false) {
  const int64_t r = std::min(s.m, s.n);
  const TestTensor matrices(device, DType::kBF16, {s.count, s.m, s.n}, values);
  const TestTensor other(device, DType::kBF16, {s.count, s.m, s.n});
  const TestTensor gram(device, DType::kBF16, {s.count, r, r}), polynomial(device, DType::kBF16, {s.count, r, r});
  orthogonalize(device, {matrices, other, gram, polynomial, steps, safety, in_halves});
  CHECK((matrices.guard_intact() && other.guard_intact() && gram.guard_intact() && polynomial.guard_intact()));
  return matrices.host();
}
std::vector<float> orthogonalized(Device& device, const Shape& s, const std::vector<float>& values,
                                  Orthogonalization kind = Orthogonalization::kNewtonSchulz,
                                  bool in_halves = false) {
  return orthogonalized(device, s, values, newton_schulz_steps(kind), orthogonalization_safety(kind), in_halves);
}

std::vector<float> matrix_of(const std::vector<float>& values, const Shape& s, int64_t i) {
  return {values.begin() + i * s.numel(), values.begin() + (i + 1) * s.numel()};
}

struct DoubleMatrix {
  int64_t rows, cols;
  std::vector<double> values;

  DoubleMatrix(int64_t rows_, int64_t cols_)
      : rows(rows_), cols(cols_), values(static_cast<size_t>(rows_ * cols_)) {}
  DoubleMatrix(int64_t rows_, int64_t cols_, const std::vector<float>& x)
      : rows(rows_), cols(cols_), values(x.begin(), x.end()) {}
  double& at(int64_t i, int64_t j) { return values[static_cast<size_t>(i * cols + j)]; }
  double at(int64_t i, int64_t j) const { return values[static_cast<size_t>(i * cols + j)]; }
  DoubleMatrix transposed() const {
    DoubleMatrix t(cols, rows);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) t.at(j, i) = at(i, j);
    }
    return t;
  }
  DoubleMatrix magnitudes() const {
    DoubleMatrix m = *this;
    for (double& x : m.values) x = std::abs(x);
    return m;
  }
  double norm() const {
    double squares = 0;
    for (double x : values) squares += x * x;
    return std::sqrt(squares);
  }
};

DoubleMatrix operator*(const DoubleMatrix& x, const DoubleMatrix& y) {
  DoubleMatrix product(x.rows, y.cols);
  for (int64_t i = 0; i < x.rows; ++i) {
    for (int64_t k = 0; k < x.cols; ++k) {
      for (int64_t j = 0; j < y.cols; ++j) product.at(i, j) += x.at(i, k) * y.at(k, j);
    }
  }
  return product;
}

DoubleMatrix sum(double a, const DoubleMatrix& x, double b, const DoubleMatrix& y) {
  DoubleMatrix total = x;
  for (size_t i = 0; i < total.values.size(); ++i) total.values[i] = a * x.values[i] + b * y.values[i];
  return total;
}

constexpr double kRounding = 0x1p-8;  // to bf16, relative

// One iteration of a matrix with at least as many columns as rows, in double, and by how much roundings of A, G and
// X to bf16 and sums in fp32 (whose every addition may lose a bit of a term: tensor cores cut off) can change it.
struct ReferenceStep {
  DoubleMatrix next, error;

  ReferenceStep(const DoubleMatrix& x, const NewtonSchulzStep& step) : next(x.rows, x.cols), error(x.rows, x.cols) {
    const double sums = 0x1p-22 * static_cast<double>(x.rows + x.cols + 8);
    const DoubleMatrix gram = x * x.transposed(), magnitude = x.magnitudes();
    const DoubleMatrix gram_size = gram.magnitudes();
    const DoubleMatrix gram_error = sum(kRounding, gram_size, sums, magnitude * magnitude.transposed());
    const DoubleMatrix polynomial = sum(step.b, gram, step.c, gram * gram);
    const DoubleMatrix polynomial_terms = sum(std::abs(step.b), gram_size, std::abs(step.c), gram_size * gram_size);
    const DoubleMatrix squared_error = sum(1, gram_size * gram_error, 1, gram_error * gram_size);
    DoubleMatrix polynomial_error = sum(std::abs(step.b), gram_error, std::abs(step.c), squared_error);
    polynomial_error = sum(1, polynomial_error, std::abs(step.c), gram_error * gram_error);
    polynomial_error = sum(1, polynomial_error, sums, polynomial_terms);
    polynomial_error = sum(1 + kRounding, polynomial_error, kRounding, polynomial.magnitudes());
    next = sum(step.a, x, 1, polynomial * x);
    error = sum(std::abs(step.a), magnitude, 1, polynomial.magnitudes() * magnitude);
    error = sum(sums, error, 1, polynomial_error * magnitude);
    error = sum(1 + kRounding, error, kRounding, next.magnitudes());
  }
};

// What becomes of x in a matrix x u v^T of powers of two u and v, or x H of orthogonal rows H of 1 and -1: there
// all elements of X, A and G are rounded alike. `row` is |v|^2, or the length of a row of H; `column` is |u|^2,
// or 1.
double rounded_factor(double norm, double row, double column, Orthogonalization kind) {
  const auto rounded = [](double x) { return double{decode_bf16(encode_bf16(static_cast<float>(x)))}; };
  double x = rounded(1 / (orthogonalization_safety(kind) * norm));
  for (const NewtonSchulzStep& s : newton_schulz_steps(kind)) {
    const double gram = rounded(x * x * row), polynomial = rounded(s.b * gram + s.c * gram * gram * column);
    x = rounded(s.a * x + polynomial * column * x);
  }
  return x;
}

// The same of a singular value, without roundings.
double singular_value_after(double x, Orthogonalization kind) {
  x /= orthogonalization_safety(kind);
  for (const NewtonSchulzStep& s : newton_schulz_steps(kind)) x *= s.a + s.b * x * x + s.c * x * x * x * x;
  return x;
}

// The orthogonal factor of a matrix of full rank, by Newton's cubic iteration in double.
DoubleMatrix orthogonal_factor(DoubleMatrix x) {
  x = sum(1 / x.norm(), x, 0, x);
  for (int i = 0; i < 100; ++i) x = sum(1.5, x, -0.5, x * x.transposed() * x);
  return x;
}

// ---- Weights ----

MuonStep make_step(const TestParameter& p, MasterForm form, const TensorView& direction,
                   const TensorView& grad_scale, uint64_t step, uint64_t first_element) {
  return {.weight = p.weight,
          .master = p.master ? p.master->view() : TensorView{},
          .master_form = form,
          .direction = direction,
          .lr = 0.02f,
          .weight_decay = 0.1f,
          .grad_scale = grad_scale,
          .weight_amax = p.weight_amax ? p.weight_amax->view() : TensorView{},
          .seed = 77,
          .step = step,
          .first_element = first_element};
}

void step_weights(Device& device, const TestParameter& p, MasterForm form, const std::vector<float>& direction,
                  float grad_scale = 1, uint64_t step = 1, uint64_t first_element = 0) {
  const TestTensor o(device, DType::kBF16, {p.numel}, direction), scale(device, DType::kF32, {1}, {grad_scale});
  muon_step(device, make_step(p, form, o, scale, step, first_element));
}

}  // namespace

TEST_CASE("muon_momentum with an fp32 momentum follows the formula in double", "[kernels][muon]") {
  constexpr int64_t N = 300, kSteps = 200;
  const double mu = GENERATE(0.95, 0.9, 0.0);
  for (Device* device : devices()) {
    TestMomentum got(*device, {DType::kF32}, N);
    std::vector<double> want(N), largest(N);
    for (int64_t t = 1; t <= kSteps; ++t) {
      const std::vector<float> gradient = gradient_at(N, t);
      got.step(DType::kF32, gradient, 0.5f, mu);
      const std::vector<float> direction = got.direction.host();
      int64_t wrong = 0;
      for (int64_t i = 0; i < N; ++i) {
        const double g = 0.5 * gradient[i];
        want[i] = mu * want[i] + (1 - mu) * g;
        largest[i] = std::max({largest[i], std::abs(g), std::abs(want[i])});
        const double u = (1 - mu) * g + mu * want[i];
        wrong += !(std::abs(direction[i] - u) <= kRounding * std::abs(u) + 0x1p-19 * largest[i]);
      }
      REQUIRE(wrong == 0);
    }
    // Each step rounds three times, at the size of what it adds, and old errors fade by mu.
    const std::vector<float> momentum = got.momentum.values.host();
    int64_t wrong = 0;
    for (int64_t i = 0; i < N; ++i) wrong += !(std::abs(momentum[i] - want[i]) <= 0x1p-19 * largest[i]);
    CHECK(wrong == 0);
    CHECK(got.guard_intact());
  }
}

TEST_CASE("muon_momentum decodes, updates in fp32 and encodes again; the direction is of what was not encoded yet",
          "[kernels][muon]") {
  constexpr float kScale = 0.37f;
  constexpr double kMu = 0.95;
  for (Device* device : devices()) {
    for (const MomentStorage& storage : kMomentStorages) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        for (const int64_t N : {1, 127, 129, 400, 8192, 3 * 8192 + 301}) {
          TestMomentum got(*device, storage, N);
          for (int64_t t = 1; t <= 3; ++t) {
            const TestTensor before(*device, DType::kF32, {N});
            moment_decode(*device, {got.momentum.view(), before});
            std::vector<float> b = before.host(), u = gradient_at(N, t);
            got.step(dtype, u, kScale, kMu);
            for (int64_t i = 0; i < N; ++i) {
              const float g = u[i] * kScale, part = static_cast<float>(1 - kMu) * (g - b[i]);
              b[i] = b[i] + part;
              const float rest = static_cast<float>(kMu) * (b[i] - g);
              u[i] = g + rest;
            }
            const TestTensor want_values(*device, DType::kF32, {N}, b), want_u(*device, DType::kBF16, {N}, u);
            const TestMoment want(*device, storage, N, true);
            moment_encode(*device, {want_values, want.view(), /*is_second=*/false});
            CAPTURE(device->name(), name_of(storage.format), storage.expanded, name_of(dtype), N, t);
            CHECK(got.momentum.same_bits(want));
            CHECK(got.direction.bytes() == want_u.bytes());
            CHECK(got.guard_intact());
          }
        }
      }
    }
  }
}

TEST_CASE("muon_momentum changes nothing and gives zeros where grad_scale is not finite", "[kernels][muon]") {
  const float bad = GENERATE(std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                             -std::numeric_limits<float>::infinity());
  CAPTURE(bad);
  for (Device* device : devices()) {
    for (const MomentStorage& storage : kMomentStorages) {
      for (const int64_t N : {300, 2 * 8192 + 130}) {
        TestMomentum skipped(*device, storage, N), stopped(*device, storage, N);
        for (TestMomentum* momentum : {&skipped, &stopped}) momentum->step(DType::kF32, gradient_at(N, 1));
        std::vector<float> gradient = gradient_at(N, 2);
        gradient[7] = bad;
        skipped.step(DType::kF32, gradient, bad);
        CHECK(skipped.momentum.same_bits(stopped.momentum));
        CHECK(same_bits(skipped.direction.host(), std::vector<float>(static_cast<size_t>(N))));
        CHECK(skipped.guard_intact());
      }
    }
  }
}

TEST_CASE("muon_momentum of a range that begins at a multiple of 128 is that within the whole", "[kernels][muon]") {
  const int64_t N = 8192 + 128 * 7 + 53;
  for (Device* device : devices()) {
    for (const MomentStorage& storage : kMomentStorages) {
      for (const int64_t split : {int64_t{128}, int64_t{384}, N / 128 * 128}) {
        TestMomentum whole(*device, storage, N), parts(*device, storage, N);
        for (int64_t t = 1; t <= 3; ++t) {
          const TestTensor gradient(*device, DType::kBF16, {N}, gradient_at(N, t));
          whole.step_range(gradient, 0, N);
          parts.step_range(gradient, split, N);
          parts.step_range(gradient, 0, split);
        }
        CAPTURE(device->name(), name_of(storage.format), split);
        CHECK(whole.same_bits(parts));
      }
    }
  }
}

TEST_CASE("another device's muon_momentum and muon_step give the CPU's bits, aligned or not",
          "[kernels][muon][devices]") {
  for (Device* device : devices()) {
    if (device == &cpu_device()) continue;
    for (const int64_t N : {int64_t{1}, int64_t{1001}, int64_t{100003}}) {
      for (const int64_t begin : {int64_t{0}, std::min<int64_t>(N - 1, 1)}) {
        for (const DType format : {DType::kF32, DType::kBF16}) {
          TestMomentum want(cpu_device(), {format}, N), got(*device, {format}, N);
          const std::vector<float> gradient = gradient_at(N, 1);
          want.step_range(TestTensor(cpu_device(), format, {N}, gradient), begin, N, 0.37f);
          got.step_range(TestTensor(*device, format, {N}, gradient), begin, N, 0.37f);
          CAPTURE(N, begin, name_of(format));
          CHECK(got.same_bits(want));
        }
        for (const MasterForm form : kMasterForms) {
          const std::vector<float> initial = random_normal(N, 23, 0.02f), o = random_bf16(N, 24, 0.02f);
          const auto stepped = [&](Device& where) {
            TestParameter p(where, {form}, initial);
            const TestTensor direction(where, DType::kBF16, {N}, o), scale(where, DType::kF32, {1}, {1.0f});
            MuonStep step = make_step(p, form, direction, scale, 3, 128);
            for (TensorView* t : {&step.weight, &step.master, &step.direction}) {
              if (!t->empty()) *t = t->rows(begin, N - begin);
            }
            muon_step(where, step);
            CHECK(p.guard_intact());
            return std::pair{p.weight.bytes(), p.master_values()};
          };
          const auto want = stepped(cpu_device()), got = stepped(*device);
          CAPTURE(N, begin, static_cast<int>(form));
          CHECK(got.first == want.first);
          CHECK(same_bits(got.second, want.second));
        }
      }
    }
  }
}

TEST_CASE("orthogonalize first divides by the norm, or by 1e-7 if that is more", "[kernels][muon]") {
  constexpr NewtonSchulzStep kIdentity[] = {{1, 0, 0}};
  for (Device* device : devices()) {
    std::vector<Shape> shapes = all_shapes();
    shapes.push_back({2, 300, 231});  // several pieces of the sum
    for (const Shape& s : shapes) {
      for (const auto& [size, safety] : {std::pair{1e-3f, 1.0f}, {1.0f, 1.02f}, {1e-10f, 1.0f}, {1e15f, 1.0f}}) {
        const std::vector<float> values = random_bf16(s.count * s.numel(), 41, size);
        const std::vector<float> got = orthogonalized(*device, s, values, kIdentity, safety);
        for (int64_t i = 0; i < s.count; ++i) {
          const std::vector<float> matrix = matrix_of(values, s, i), scaled = matrix_of(got, s, i);
          const double norm = DoubleMatrix(s.m, s.n, matrix).norm(), divisor = std::max(safety * norm, 1e-7);
          int64_t wrong = 0;
          for (size_t k = 0; k < matrix.size(); ++k) {
            const double want = matrix[k] / divisor;
            wrong += !(std::abs(scaled[k] - want) <= (kRounding + 0x1p-20) * std::abs(want));
          }
          CAPTURE(device->name(), s.m, s.n, size);
          CHECK(wrong == 0);
        }
      }
    }
  }
}

// What the first k steps give is where step k begins, exactly. So every step is compared alone.
TEST_CASE("each iteration of orthogonalize is the formula in double but for its roundings", "[kernels][muon]") {
  const Orthogonalization kind = GENERATE(Orthogonalization::kNewtonSchulz, Orthogonalization::kPolarExpress);
  const std::span<const NewtonSchulzStep> steps = newton_schulz_steps(kind);
  const float safety = orthogonalization_safety(kind);
  REQUIRE(steps.size() == 5);
  for (Device* device : devices()) {
    std::vector<Shape> shapes = all_shapes();
    for (const Shape& in_halves : {Shape{2, 136, 150}, Shape{1, 264, 200}}) shapes.push_back(in_halves);
    for (const Shape& s : shapes) {
      const bool in_halves = s.numel() > 70 * 70;
      const std::vector<float> values = random_bf16(s.count * s.numel(), 42, 0.3f);
      std::vector<NewtonSchulzStep> taken = {{1, 0, 0}};
      std::vector<float> before = orthogonalized(*device, s, values, taken, safety);
      for (size_t k = 0; k < steps.size(); ++k) {
        const std::vector<float> after = orthogonalized(*device, s, values, steps.first(k + 1), safety, in_halves);
        int64_t wrong = 0;
        for (int64_t i = 0; i < s.count; ++i) {
          const bool is_tall = s.m > s.n;
          const DoubleMatrix x(s.m, s.n, matrix_of(before, s, i)), got(s.m, s.n, matrix_of(after, s, i));
          const ReferenceStep want(is_tall ? x.transposed() : x, steps[k]);
          const DoubleMatrix next = is_tall ? want.next.transposed() : want.next;
          const DoubleMatrix error = is_tall ? want.error.transposed() : want.error;
          for (size_t e = 0; e < got.values.size(); ++e) {
            wrong += !(std::abs(got.values[e] - next.values[e]) <= error.values[e]);
          }
        }
        CAPTURE(device->name(), s.count, s.m, s.n, k);
        CHECK(wrong == 0);
        before = after;
      }
    }
  }
}

// Singular values of well-conditioned matrices end between 0.68 and 1.14 or so: a mean square distance of less than
// 0.3 from 1, to which roundings add little.
TEST_CASE("orthogonalize comes near the orthogonal factor", "[kernels][muon]") {
  const Orthogonalization kind = GENERATE(Orthogonalization::kNewtonSchulz, Orthogonalization::kPolarExpress);
  for (Device* device : devices()) {
    for (const Shape& s : {Shape{1, 32, 96}, Shape{1, 96, 32}, Shape{1, 1, 80}, Shape{1, 48, 64}}) {
      const std::vector<float> values = random_bf16(s.numel(), 43, 1e-2f);
      const DoubleMatrix x(s.m, s.n, values), got(s.m, s.n, orthogonalized(*device, s, values, kind));
      const DoubleMatrix want = s.m > s.n ? orthogonal_factor(x.transposed()).transposed() : orthogonal_factor(x);
      CAPTURE(device->name(), s.m, s.n);
      CHECK(sum(1, got, -1, want).norm() < 0.35 * std::sqrt(static_cast<double>(std::min(s.m, s.n))));
    }
  }
}

TEST_CASE("orthogonalize of rank 1 or of an orthogonal matrix follows the recurrence of one singular value",
          "[kernels][muon]") {
  for (Device* device : devices()) {
    for (const Shape& s :
         {Shape{1, 16, 64}, Shape{1, 64, 16}, Shape{1, 32, 32}, Shape{1, 1, 64}, Shape{1, 64, 1}}) {
      // Hadamard's matrix has orthogonal rows and columns.
      std::vector<float> rank1, hadamard;
      double rows = 0, columns = 0;  // squares of u and v
      const auto u = [](int64_t row) { return std::ldexp(1.0f, static_cast<int>(row % 3)); };
      const auto v = [](int64_t col) { return std::ldexp(col % 3 == 0 ? -1.0f : 1.0f, static_cast<int>(col % 4)); };
      for (int64_t row = 0; row < s.m; ++row) rows += u(row) * u(row);
      for (int64_t col = 0; col < s.n; ++col) columns += v(col) * v(col);
      for (int64_t i = 0; i < s.numel(); ++i) {
        const int64_t row = i / s.n, col = i % s.n;
        rank1.push_back(u(row) * v(col));
        hadamard.push_back(std::popcount(static_cast<uint64_t>(row & col)) % 2 == 0 ? 1.0f : -1.0f);
      }
      // `rank`: of equal singular values.
      const auto check = [&](const std::vector<float>& values, int64_t rank, double row, double column,
                             Orthogonalization kind) {
        const double norm = DoubleMatrix(s.m, s.n, values).norm(), root = std::sqrt(static_cast<double>(rank));
        const double factor = rounded_factor(norm, row, column, kind);
        const std::vector<float> got = orthogonalized(*device, s, values, kind);
        // Other devices may cut off bits of sums: that decides a tie otherwise, and a rounding of A counts 13
        // times.
        const double tolerance = kRounding * (device == &cpu_device() ? 2 : 16);
        int64_t wrong = 0;
        for (size_t i = 0; i < got.size(); ++i) {
          const double want = factor * values[i];
          wrong += !(std::abs(got[i] - want) <= tolerance * std::abs(want));
        }
        const double sigma = factor * norm / root, exact = singular_value_after(1 / root, kind);
        CAPTURE(device->name(), s.m, s.n, rank, sigma, exact);
        CHECK(wrong == 0);
        CHECK(std::abs(sigma - exact) < 0.2);  // roundings of A move the sum of terms that nearly cancel
      };
      const auto most = static_cast<double>(std::max(s.m, s.n));
      const bool is_tall = s.m > s.n;
      check(rank1, 1, is_tall ? rows : columns, is_tall ? columns : rows, Orthogonalization::kNewtonSchulz);
      for (const Orthogonalization kind : {Orthogonalization::kNewtonSchulz, Orthogonalization::kPolarExpress}) {
        check(hadamard, std::min(s.m, s.n), most, 1, kind);
      }
    }
  }
}

TEST_CASE("orthogonalize of a transpose is the transpose but for the order of sums", "[kernels][muon]") {
  for (Device* device : devices()) {
    for (const Shape& s : {Shape{1, 24, 70}, Shape{1, 64, 128}, Shape{1, 1, 9}}) {
      const std::vector<float> values = random_bf16(s.numel(), 44);
      const DoubleMatrix wide(s.m, s.n, values), turned = wide.transposed();
      const DoubleMatrix want(s.m, s.n, orthogonalized(*device, s, values));
      const std::vector<float> tall(turned.values.begin(), turned.values.end());
      const DoubleMatrix got(s.n, s.m, orthogonalized(*device, {1, s.n, s.m}, tall));
      // All numbers are rounded alike where sums are, and elsewhere three times in each of 5 iterations.
      CAPTURE(device->name(), s.m, s.n);
      CHECK(sum(1, got.transposed(), -1, want).norm() <= 15 * kRounding * want.norm());
    }
  }
}

TEST_CASE("orthogonalize gives a matrix the same bits alone and among others", "[kernels][muon]") {
  for (Device* device : devices()) {
    for (const Shape& s : {Shape{7, 64, 96}, Shape{5, 128, 64}, Shape{3, 33, 57}, Shape{4, 1, 40},
                           Shape{3, 256, 256}, Shape{17, 96, 40}}) {
      for (const bool in_halves : {false, true}) {
        const auto result = [&](int64_t count, const std::vector<float>& values) {
          return orthogonalized(*device, {count, s.m, s.n}, values, Orthogonalization::kNewtonSchulz, in_halves);
        };
        const std::vector<float> values = random_bf16(s.count * s.numel(), 45, 0.1f);
        const std::vector<float> together = result(s.count, values);
        CHECK(same_bits(together, result(s.count, values)));
        for (int64_t i = 0; i < s.count; ++i) {
          CAPTURE(device->name(), s.m, s.n, in_halves, i);
          CHECK(same_bits(result(1, matrix_of(values, s, i)), matrix_of(together, s, i)));
        }
      }
    }
  }
}

TEST_CASE("orthogonalize leaves a matrix of zeros, beside others too", "[kernels][muon]") {
  const Orthogonalization kind = GENERATE(Orthogonalization::kNewtonSchulz, Orthogonalization::kPolarExpress);
  for (Device* device : devices()) {
    const Shape s{3, 20, 30};
    std::vector<float> values = random_bf16(s.count * s.numel(), 46);
    std::fill_n(values.begin() + s.numel(), s.numel(), 0.0f);
    const std::vector<float> got = orthogonalized(*device, s, values, kind);
    const std::vector<float> zeros = matrix_of(got, s, 1);
    CHECK(std::all_of(zeros.begin(), zeros.end(), [](float x) { return x == 0; }));
    CHECK(std::all_of(got.begin(), got.end(), [](float x) { return std::isfinite(x); }));
    for (const Shape& empty : {Shape{0, 20, 30}, Shape{3, 0, 30}, Shape{3, 20, 0}}) {
      CHECK(orthogonalized(*device, empty, {}, kind).empty());
    }
  }
}

TEST_CASE("muon_step is its formula in fp32, rounded as each master form is", "[kernels][muon]") {
  const uint64_t first_element = (uint64_t{1} << 33) + 640, t = (uint64_t{1} << 40) + 3;
  for (Device* device : devices()) {
    for (const int64_t N : {1, 127, 301, 20011}) {
      const std::vector<float> o = random_bf16(N, 51, 0.02f);
      for (const MasterForm form : kMasterForms) {
        TestParameter p(*device, {form}, random_normal(N, 52, 0.02f));
        const std::vector<float> before = p.master_values();
        step_weights(*device, p, form, o, 0.5f, t, first_element);  // any finite grad_scale
        const std::vector<float> got = p.master_values(), weight = p.weight.host();
        int64_t wrong = 0;
        for (int64_t i = 0; i < N; ++i) {
          const float update = o[i], decay = 0.1f * before[i], change = 0.02f * (update + decay);
          const float exact = before[i] - change;
          const uint64_t e = first_element + static_cast<uint64_t>(i);
          switch (form) {
            case MasterForm::kNone:
            case MasterForm::kFp32: wrong += got[i] != exact; break;
            case MasterForm::kFp24Split: wrong += got[i] != round_to_float24(exact, rounding_phase(t, e)); break;
            case MasterForm::kBf16Sr: {
              const uint32_t random = philox4x32(77, t, e / 4)[e % 4];
              wrong += got[i] != decode_bf16(encode_bf16_stochastic(exact, random));
            }
          }
          if (form == MasterForm::kFp32 || form == MasterForm::kFp24Split) {
            wrong += weight[i] != decode_bf16(split_float(got[i]).weight);
          }
        }
        CAPTURE(device->name(), N, static_cast<int>(form));
        CHECK(wrong == 0);
        CHECK(p.guard_intact());
      }
    }
  }
}

TEST_CASE("muon_step raises weight_amax, and does nothing else where grad_scale is not finite", "[kernels][muon]") {
  for (Device* device : devices()) {
    for (const MasterForm form : kMasterForms) {
      for (const int64_t N : {1, 129, 20011}) {
        std::vector<float> initial = random_normal(N, 53, 0.02f);
        initial[static_cast<size_t>(N / 2)] = -0.7f;
        TestParameter p(*device, {form}, initial), plain(*device, {form}, initial), still(*device, {form}, initial);
        const std::vector<float> o = random_bf16(N, 54, 0.02f);
        for (const auto& [before, grad_scale] :
             {std::pair{0.0f, kNan}, {1000.0f, kInfinity}, {0.0f, 1.0f}, {1000.0f, 1.0f}}) {
          p.weight_amax = std::make_unique<TestTensor>(*device, DType::kF32, std::initializer_list<int64_t>{1},
                                                       std::vector{before});
          step_weights(*device, p, form, o, grad_scale);
          step_weights(*device, plain, form, o, grad_scale);
          float largest = before;
          for (float w : p.weight.host()) largest = std::max(largest, std::abs(w));
          CAPTURE(device->name(), static_cast<int>(form), N, before, grad_scale);
          CHECK(p.weight_amax->host()[0] == largest);
          CHECK(p.same_bits(plain));
          CHECK((p.same_bits(still) || std::isfinite(grad_scale)));
          if (std::isfinite(grad_scale)) step_weights(*device, still, form, o);
          CHECK((p.weight_amax->guard_intact() && p.guard_intact()));
        }
      }
    }
  }
}

TEST_CASE("Muon's ops refuse tensors of a wrong shape or dtype", "[kernels][muon]") {
  Device& device = *devices().front();
  constexpr int64_t N = 130;
  const TestTensor fp32(device, DType::kF32, {N}, std::vector<float>(N)), one(device, DType::kF32, {1}, {1.0f});
  const TestTensor bf16(device, DType::kBF16, {N}, std::vector<float>(N)), shorter(device, DType::kBF16, {N - 1});
  const TestTensor u16(device, DType::kU16, {N});
  const TestMoment moment(device, {DType::kE4M3, true}, N, true);
  const auto is_refused = [&](const auto& good, const auto& op, const auto& change) {
    auto a = good;
    change(a);
    return !internal_error([&] { op(device, a); }).empty();
  };
  const MuonMomentum momentum{fp32, moment.view(), 0.95, one, bf16};
  const auto refuses_momentum = [&](const std::function<void(MuonMomentum&)>& change) {
    return is_refused(momentum, muon_momentum, change);
  };
  CHECK_FALSE(refuses_momentum([](MuonMomentum&) {}));
  CHECK(refuses_momentum([&](MuonMomentum& a) { a.gradient = u16; }));
  CHECK(refuses_momentum([&](MuonMomentum& a) { a.momentum.amax = {}; }));
  CHECK(refuses_momentum([&](MuonMomentum& a) { a.grad_scale = fp32; }));
  CHECK(refuses_momentum([&](MuonMomentum& a) { a.direction = shorter; }));
  CHECK(refuses_momentum([&](MuonMomentum& a) { a.direction = fp32; }));

  const TestTensor x(device, DType::kBF16, {2, 3, 4}, std::vector<float>(24)), y(device, DType::kBF16, {2, 3, 4});
  const TestTensor gram(device, DType::kBF16, {2, 3, 3}), polynomial(device, DType::kBF16, {2, 3, 3});
  const Orthogonalize matrices{x, y, gram, polynomial, newton_schulz_steps(Orthogonalization::kNewtonSchulz), 1};
  const auto refuses_matrices = [&](const std::function<void(Orthogonalize&)>& change) {
    return is_refused(matrices, orthogonalize, change);
  };
  CHECK_FALSE(refuses_matrices([](Orthogonalize&) {}));
  CHECK(refuses_matrices([&](Orthogonalize& a) { a.matrices = a.matrices.reshaped({6, 4}); }));
  CHECK(refuses_matrices([&](Orthogonalize& a) { a.other = a.other.reshaped({2, 4, 3}); }));
  CHECK(refuses_matrices([&](Orthogonalize& a) { a.gram = a.matrices; }));
  CHECK(refuses_matrices([&](Orthogonalize& a) { a.polynomial = {}; }));
  CHECK(refuses_matrices([&](Orthogonalize& a) { a.steps = {}; }));
  CHECK(refuses_matrices([&](Orthogonalize& a) { a.safety = 0.9f; }));

  TestParameter p(device, {MasterForm::kFp32}, std::vector<float>(N));
  const MuonStep step = make_step(p, MasterForm::kFp32, bf16, one, 1, 0);
  const auto refuses_step = [&](const std::function<void(MuonStep&)>& change) {
    return is_refused(step, muon_step, change);
  };
  CHECK_FALSE(refuses_step([](MuonStep&) {}));
  CHECK(refuses_step([&](MuonStep& a) { a.weight = fp32; }));
  CHECK(refuses_step([&](MuonStep& a) { a.master = {}; }));
  CHECK(refuses_step([&](MuonStep& a) { a.master_form = MasterForm::kBf16Sr; }));
  CHECK(refuses_step([&](MuonStep& a) { a.direction = shorter; }));
  CHECK(refuses_step([&](MuonStep& a) { a.grad_scale = {}; }));
  CHECK(refuses_step([&](MuonStep& a) { a.weight_amax = fp32; }));
  CHECK(refuses_step([&](MuonStep& a) { a.first_element = 64; }));
}
