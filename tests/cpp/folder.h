// A folder that goes with the test.
#pragma once

#include <filesystem>
#include <random>
#include <string>

namespace fastdraft::testing {

class Folder {
 public:
  Folder()
      : path_(std::filesystem::temp_directory_path() /
              ("fastdraft-test-" + std::to_string(std::random_device{}()))) {
    std::filesystem::create_directory(path_);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() { std::filesystem::remove_all(path_); }

  std::string file(const char* name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

}  // namespace fastdraft::testing
