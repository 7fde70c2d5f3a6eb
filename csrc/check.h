// Errors that carry where they were found.
#pragma once

#include <stdexcept>
#include <string>

#define DAPO_CHECK(condition, message)                                                                    \
  do {                                                                                                    \
    if (!(condition)) {                                                                                   \
      throw std::runtime_error(std::string(message) + " (" + __FILE__ + ":" + std::to_string(__LINE__) + ")"); \
    }                                                                                                     \
  } while (0)
