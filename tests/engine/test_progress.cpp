// How fast a run says that it is.
#include "engine/training/progress.h"

#include <cmath>
#include <string>
#include <vector>

#include "engine/config/config_io.h"
#include "engine/training/speed.h"
#include "tests/support/catch.h"

using namespace parka;

TEST_CASE("FLOP per token follow the documented formula", "[engine]") {
  ModelConfig olmo_1b;  // the defaults
  const ParameterTable table = make_parameter_table(olmo_1b, false);
  CHECK(flop_per_token(olmo_1b, table, 2048) == 6.0 * 1'176'764'416 + 6.0 * 16 * 2048 * 2048);
}

TEST_CASE("a mixture counts the experts that a token uses", "[engine]") {
  const Config olmoe = load_config(PARKA_SOURCE_DIR "/configs/olmoe-1b-7b.json", {});
  const ParameterTable table = make_parameter_table(olmoe.model, false);
  // Of each block: queries, keys, values, output; router; 8 experts of up, gate and down; norms, those of q and k
  // too.
  const double block = 4 * 2048 * 2048 + 64 * 2048 + 8 * 3 * 1024 * 2048 + 4 * 2048, vocabulary = 50304.0 * 2048;
  const double active = 16 * block + 2048 + vocabulary;
  CHECK(flop_per_token(olmoe.model, table, 4096) == 6 * active + 6.0 * 16 * 4096 * 2048);
  CHECK(std::abs(flop_per_token(olmoe.model, table, 4096) - 7.88e9) < 0.005e9);
  CHECK(static_cast<double>(table.num_active_parameters()) == active + vocabulary);
  CHECK(parameters_text(table) == "6.92B parameters, of which a token uses 1.28B");
  const ModelConfig dense;
  CHECK(parameters_text(make_parameter_table(dense, false)) == "1.18B parameters");
}

TEST_CASE("FLOP of images are counted by what of them is trained", "[engine][vision]") {
  const Config llava = load_config(PARKA_SOURCE_DIR "/configs/llava-1.5-7b-bench.json", {});
  Config text = llava;
  text.model.vision = {};
  const ParameterTable of_text = make_parameter_table(text.model, false);
  const auto of_image = [&](const std::vector<std::string>& frozen) {
    const ParameterTable table = make_parameter_table(llava.model, false, {.frozen = frozen});
    CHECK(flop_per_token(llava.model, table, 1088) == flop_per_token(text.model, of_text, 1088));
    return 1088 * (flop_per_token(llava.model, table, 1088, 1) - flop_per_token(llava.model, table, 1088));
  };
  // Rows times elements of weights; the patch embedding has 592 columns, and 23 of 24 blocks run.
  const double patch = 576.0 * 1024 * 592, blocks = 577.0 * 23 * 12 * 1024 * 1024;
  const double fc1 = 576.0 * 1024 * 4096, fc2 = 576.0 * 4096 * 4096, attention = 2.0 * 577 * 577 * 1024 * 23;
  const double frozen_tower = 2 * (patch + blocks + attention + 2 * fc1 + 3 * fc2);
  CHECK(std::abs(of_image({"vision.*"}) / frozen_tower - 1) < 1e-9);
  const double all = 2 * (2 * patch + 3 * (blocks + attention + fc1 + fc2));
  CHECK(std::abs(of_image({}) / all - 1) < 1e-9);
}

TEST_CASE("numbers in progress lines are readable", "[engine][progress]") {
  CHECK(format_count(999) == "999");
  CHECK(format_count(1234) == "1.23k");
  CHECK(format_count(999'600) == "1M");
  CHECK(format_count(4.2e9) == "4.2B");
  CHECK(format_duration(59.4) == "59s");
  CHECK(format_duration(61) == "1m01s");
  CHECK(format_duration(3600 * 47 + 60) == "47h01m");
  CHECK(format_duration(86400 * 3) == "3d00h");
}

TEST_CASE("progress lines count the steps since the previous line, and the time left by the clock on the wall",
          "[engine][progress]") {
  double now = 1000;
  Progress progress(100, 1000, {.flop_per_token = 1e9, .peak_flops = 2e12}, 2, [&] { return now; });
  StepReport report;
  report.loss = 2.5;
  report.scalars = {{"loss", 2.5}, {"grad_norm", 0}, {"balance_loss", 0.012344}, {"imbalance", 12}};
  for (int64_t step = 1; step <= 10; ++step) {
    report.step = step;
    report.seconds = 0.5;
    progress.add(report, 0.625);
  }
  now += 8;  // 5 of them in steps
  const std::string line = progress.take_line();
  CHECK(line.find("step  10/100") != std::string::npos);
  CHECK(line.find("tokens 10k") != std::string::npos);
  CHECK(line.find("loss 2.5000  norm 0.000  balance_loss 0.01234  imbalance 12  lr") != std::string::npos);
  CHECK(line.find("2k tok/s  2 TFLOP/s  MFU 50.0%") != std::string::npos);
  CHECK(line.find("goodput 62.5%  ETA 1m12s") != std::string::npos);
  for (const size_t columns : {20, 60, 80, 120, 300}) {
    CAPTURE(columns);
    const std::string shown = progress.take_line(columns);
    CHECK((shown.size() < columns || columns == 20));
    CHECK(shown.find("loss 2.5000") != std::string::npos);
    CHECK((shown.find("10%") != std::string::npos) == (columns > 20));
    CHECK((shown.find("imbalance") != std::string::npos) == (columns == 300));
  }
}
