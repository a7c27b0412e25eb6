// What the tests of a CUDA model have in common: they need a device.
#pragma once

#include <gtest/gtest.h>

#include "attention/cuda/cuda.h"

namespace kvasir::model {

class NeedsDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    if (Status s = attention::cuda_backend().available(); !s.ok()) GTEST_SKIP() << "skipped: " << s.message();
  }
};

}  // namespace kvasir::model
