// How many threads of a pool take part in a call: fewer where others use the cores, so that nobody waits for a thread whose core was taken.
//
// Calls are looked at in windows. Where the caller has waited for late threads in more than a tenth of a window's time, one window each is
// tried with fewer threads, and the fastest number is kept; a number below all of them is compared with larger ones from time to time, the
// more seldom the more often that was in vain. On a quiet host nothing is tried.
#pragma once
#include <algorithm>
#include <vector>

namespace expertd {

class Crew {
 public:
  static constexpr int kWindow = 16;       // calls
  static constexpr double kLate = 0.1;     // part of a window's time that is waited for late threads, from which on fewer are tried
  static constexpr double kBetter = 0.95;  // of the present number's time: what another number must reach
  static constexpr int kFirstRest = 8, kMostRest = 512;  // windows between two comparisons

  explicit Crew(int most) : most_(most), size_(most), chosen_(most) {}
  int most() const { return most_; }
  int size() const { return size_; }      // for the next call
  int chosen() const { return chosen_; }  // without what is being tried

  // A call with size() threads took `us`, of which its caller waited `late_us` for threads that were late; forecast_us: what its bytes and
  // products would take one quick core.
  void took(double us, double forecast_us, double late_us) {
    us_ += us, forecast_ += forecast_us, late_ += late_us;
    if (++calls_ < kWindow) return;
    const double pace = us_ / std::max(forecast_, 1e-9);
    const bool late = late_ > kLate * us_;
    calls_ = 0, us_ = forecast_ = late_ = 0;
    if (!trials_.empty()) return tried(pace);
    resting_++;
    if (resting_ < rest_) return;
    if (late && size_ > 1) return begin(pace, {size_ - 1, size_ - 2, size_ * 3 / 4, size_ / 2}, 1, size_ - 1);
    if (size_ < most_) begin(pace, {size_ + 1, size_ + 2, size_ * 2, most_}, size_ + 1, most_);
  }

 private:
  void begin(double pace, std::vector<int> sizes, int least, int most) {
    for (int& n : sizes) n = std::min(std::max(n, least), most);
    std::sort(sizes.begin(), sizes.end());
    sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
    trials_ = std::move(sizes);
    best_ = pace * kBetter;
    size_ = trials_.back();
  }

  void tried(double pace) {
    if (pace < best_) best_ = pace, chosen_ = size_, found_ = true;
    trials_.pop_back();
    if (!trials_.empty()) {
      size_ = trials_.back();
      return;
    }
    size_ = chosen_;
    resting_ = 0;
    rest_ = found_ ? kFirstRest : std::min(2 * rest_, kMostRest);
    found_ = false;
  }

  int most_, size_, chosen_;
  int calls_ = 0, resting_ = kFirstRest, rest_ = 1;  // windows
  double us_ = 0, forecast_ = 0, late_ = 0;          // of the window
  std::vector<int> trials_;                          // sizes still to be tried, the present one last
  double best_ = 0;
  bool found_ = false;
};

}  // namespace expertd
