#pragma once
#ifdef PARKA_CATCH2_V3
#include <catch2/catch_all.hpp>
using Catch::Approx;  // as in v2
#else
#include <catch2/catch.hpp>
#endif
