// The engine without Python: every kernel and rule against a dense double-precision definition, and the
// same bits from one thread and from four; and the same output from a store in chunks. For other processors
// (under qemu) and for ThreadSanitizer.
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "engine.h"
#include "memory.h"

using namespace parzen;
extern "C" {
const char* parzen_isa(int64_t);
int32_t parzen_forward(int64_t, const Args*);
int32_t parzen_backward(int64_t, const Args*);
int32_t parzen_recall(int64_t, const Recall*);
int32_t parzen_code(int64_t, const Recall*);
}

static int32_t threads_for(int64_t begin, int64_t end, int64_t, Body body, void* context) {
  std::vector<std::thread> pool;
  for (int64_t i = begin; i < end; i++) pool.emplace_back(body, i, i + 1, context);
  for (auto& t : pool) t.join();
  return 0;
}

struct Case {
  const char* name;
  int64_t profile, rule, k;
  double r, level, scale;
};
static const Case cases[] = {
    {"sparsemax", POWER, UNIT_MASS, 0, 1, 0, 0.7},      {"1.5-entmax", POWER, UNIT_MASS, 0, 2, 0, 0.7},
    {"4/3-entmax", POWER, UNIT_MASS, 0, 3, 0, 0.7},     {"entmax r=7", POWER, UNIT_MASS, 0, 7, 0, 0.7},
    {"dense entmax", POWER, UNIT_MASS, 0, 2, 0, 0.01},  {"dense r=40", POWER, UNIT_MASS, 0, 40, 0, 0.02},
    {"relumax", POWER, MARGIN, 0, 1, 1.5, 0.7},         {"relumax dense", POWER, MARGIN, 0, 1, 3, 0.05},
    {"exp margin", EXP, MARGIN, 0, 0, 2, 0.7},          {"radius", POWER, THRESHOLD, 0, 1, 0.2, 0.5},
    {"radius dense", POWER, THRESHOLD, 0, 3, -9, 0.5},  {"knn", EXP, NEAREST, 9, 0, 0, 0.7},
    {"gauss", EXP, EVERYWHERE, 0, 0, 0, 0.3},
};

constexpr int64_t B = 1, H = 2, Hk = 1, T = 101, S = 150, PER_ROW = 64;
// Whole vectors, and rows that end within one.
constexpr int64_t widths[][2] = {{16, 32}, {37, 5}, {1, 75}};
static int64_t E, D;

template <class X>
using Array = std::vector<X>;

// Weights and their derivative factor of one row of scores (−∞ = not allowed).
static void definition(const Case& c, const Array<double>& s, Array<double>& w, Array<double>& a) {
  const int64_t n = s.size();
  double m = -INFINITY;
  for (double x : s) m = std::max(m, x);
  w.assign(n, 0), a.assign(n, 0);
  if (m == -INFINITY) return;
  double theta = c.rule == MARGIN ? m - c.level : c.rule == THRESHOLD ? c.level : -INFINITY;
  if (c.rule == NEAREST) {
    Array<double> sorted = s;
    std::sort(sorted.rbegin(), sorted.rend());
    if (n >= c.k) theta = sorted[c.k - 1];
  }
  const double gain = c.rule == UNIT_MASS ? 1 / c.r : 1;
  if (c.rule == UNIT_MASS) {
    double lo = m - c.r, hi = m;
    for (int step = 0; step < 200; step++) {
      theta = (lo + hi) / 2;
      double mass = 0;
      for (double x : s)
        if (x > theta) mass += pow((x - theta) * gain, c.r);
      (mass >= 1 ? lo : hi) = theta;
    }
  }
  double z = 0;
  for (int64_t j = 0; j < n; j++) {
    if (s[j] == -INFINITY || s[j] < theta || (c.profile == POWER && s[j] <= theta)) continue;
    const double y = (s[j] - theta) * gain;
    w[j] = c.profile == EXP ? exp(s[j] - m) : pow(y, c.r);
    a[j] = c.profile == EXP ? w[j] : c.r * gain * pow(y, c.r - 1);
    z += w[j];
  }
  for (int64_t j = 0; j < n; j++) w[j] /= z > 0 ? z : 1, a[j] /= z > 0 ? z : 1;
}

template <class X>
struct Run {
  Array<X> q, k, v, o, dout, dq, dk, dv, stats, score;
  Array<int64_t> where;
  Array<int32_t> count, index;

  explicit Run(unsigned seed) {
    std::mt19937 g(seed);
    std::normal_distribution<double> normal;
    for (auto [x, n] : {std::pair{&q, B * H * T * E}, {&k, B * Hk * S * E}, {&v, B * Hk * S * D}, {&dout, B * H * T * D}}) {
      x->resize(n);
      for (X& y : *x) y = (X)normal(g);
    }
    o.resize(B * H * T * D), dq.resize(q.size()), dk.resize(k.size()), dv.resize(v.size());
    stats.resize(B * H * T * 5), where.resize(B * H * T), count.resize(B * H * T);
    index.resize(B * H * T * PER_ROW), score.resize(B * H * T * PER_ROW);
  }

  static View view(Array<X>& x, int64_t heads, int64_t length, int64_t width) {
    return {x.data(), heads * length * width, length * width, width, 1};
  }

  void call(const Case& c, int64_t isa, int64_t threads) {
    Args A;
    memset(&A, 0, sizeof A);
    A.B = B, A.H = H, A.Hk = Hk, A.T = T, A.S = S, A.E = E, A.D = D;
    A.is_double = sizeof(X) == 8, A.profile = c.profile, A.rule = c.rule, A.nearest = c.k;
    A.diagonal = S - T, A.left = -1, A.right = 0, A.threads = threads;
    A.scale = c.scale, A.level = c.level, A.r = c.r;
    A.parallel_for = threads_for, A.rows = B * T;
    A.q = view(q, H, T, E), A.k = view(k, Hk, S, E), A.v = view(v, Hk, S, D), A.o = view(o, H, T, D);
    A.stats = stats.data(), A.where = where.data(), A.count = count.data(), A.index = index.data();
    A.score = score.data(), A.per_row = PER_ROW;
    A.dout = view(dout, H, T, D), A.dq = view(dq, H, T, E), A.dk = view(dk, Hk, S, E), A.dv = view(dv, Hk, S, D);
    if (parzen_forward(isa, &A) || parzen_backward(isa, &A)) {
      printf("out of memory\n");
      exit(1);
    }
  }

  // The outputs once more, from chunks of 64 keys with their codes, but for the last one.
  Array<X> recalled(const Case& c, int64_t isa, int64_t threads) {
    constexpr int64_t CHUNK = 64, CHUNKS = (S + CHUNK - 1) / CHUNK;
    Array<X> out(o.size());
    Array<Array<uint8_t>> codes(CHUNKS, Array<uint8_t>(Hk * CHUNK * ((E + 3) / 4 * 4)));
    Array<Array<float>> bounds(CHUNKS, Array<float>(Hk * CHUNK * 2)), frame(CHUNKS, Array<float>(Hk * (2 * E + 1)));
    Array<Chunk> chunks(CHUNKS);
    Recall A;
    memset(&A, 0, sizeof A);
    A.B = B, A.H = H, A.Hk = Hk, A.T = T, A.S = S, A.E = E, A.D = D, A.stored = sizeof(X) == 8 ? DOUBLE : FLOAT;
    A.profile = c.profile, A.rule = c.rule, A.nearest = c.k, A.diagonal = S - T, A.left = -1, A.right = 0;
    A.threads = threads, A.scale = c.scale, A.level = c.level, A.r = c.r, A.parallel_for = threads_for;
    A.chunk = CHUNK, A.q = view(q, H, T, E), A.o = view(out, H, T, D);
    int32_t failed = 0;
    for (int64_t n = 0; n < CHUNKS; n++) {
      chunks[n] = {k.data() + n * CHUNK * E, v.data() + n * CHUNK * D, S * E, S * D, codes[n].data(), bounds[n].data(), frame[n].data()};
      A.chunks = &chunks[n];
      if ((n + 1) * CHUNK <= S) failed |= parzen_code(isa, &A);
      else chunks[n].codes = nullptr;
    }
    A.chunks = chunks.data();
    if (failed || parzen_recall(isa, &A)) {
      printf("out of memory\n");
      exit(1);
    }
    return out;
  }

  // The largest error of o, dq, dk, dv against the definition.
  double error(const Case& c) const {
    Array<double> eo(o.size()), eq(q.size()), ek(k.size()), ev(v.size()), s(S), w, a, dw(S);
    for (int64_t h = 0; h < H; h++)
      for (int64_t i = 0; i < T; i++) {
        const int64_t row = h * T + i;
        for (int64_t j = 0; j < S; j++) {
          s[j] = 0;
          for (int64_t e = 0; e < E; e++) s[j] += (double)q[row * E + e] * k[j * E + e] * c.scale;
          if (j > i + S - T) s[j] = -INFINITY;
        }
        definition(c, s, w, a);
        double mu = 0, total = 0, all = 0, m = -INFINITY, ties = 0;
        for (int64_t j = 0; j < S; j++) {
          dw[j] = 0;
          for (int64_t d = 0; d < D; d++) {
            eo[row * D + d] += w[j] * v[j * D + d];
            dw[j] += (double)v[j * D + d] * dout[row * D + d];
            ev[j * D + d] += w[j] * dout[row * D + d];
          }
          const double u = c.rule == UNIT_MASS ? a[j] : w[j];
          mu += u * dw[j], total += u, m = std::max(m, s[j]);
        }
        mu = total > 0 ? mu / total : 0;
        for (int64_t j = 0; j < S; j++) all += a[j] * (dw[j] - mu), ties += s[j] == m;
        for (int64_t j = 0; j < S; j++) {
          double ds = a[j] * (dw[j] - mu);
          if (c.rule == MARGIN && s[j] == m) ds -= all / ties;
          for (int64_t e = 0; e < E; e++) {
            eq[row * E + e] += ds * c.scale * k[j * E + e];
            ek[j * E + e] += ds * c.scale * q[row * E + e];
          }
        }
      }
    double worst = 0;
    auto compare = [&](const Array<X>& x, const Array<double>& y) {
      double size = 1;
      for (double t : y) size = std::max(size, fabs(t));
      for (size_t l = 0; l < x.size(); l++) {
        const double e = fabs(x[l] - y[l]) / size;
        worst = e <= worst ? worst : e;  // NaN stays
      }
    };
    compare(o, eo), compare(dq, eq), compare(dk, ek), compare(dv, ev);
    return worst;
  }
};

template <class X>
static int check(const Case& c, int64_t isa, double allowed) {
  Run<X> one(1), four(1);
  one.call(c, isa, 1);
  four.call(c, isa, 4);
  const bool same = one.o == four.o && one.dq == four.dq && one.dk == four.dk && one.dv == four.dv;
  const Array<X> store = one.recalled(c, isa, 1);
  const bool same_store = store == four.recalled(c, isa, 4);
  double apart = 0;
  for (size_t l = 0; l < store.size(); l++) {
    const double e = fabs(store[l] - one.o[l]);
    apart = e <= apart ? apart : e;  // NaN stays
  }
  if (!same_store || !(apart <= allowed))
    printf("%s, %s, %s: a store is off by %.1e (allowed %.0e), %s bits from 4 threads\n", parzen_isa(isa), c.name,
           sizeof(X) == 8 ? "double" : "float", apart, allowed, same_store ? "equal" : "other");
  const double error = one.error(c);
  const bool good = same && error <= allowed;
  if (!good)
    printf("%s, %s, %s: error %.1e (allowed %.0e), %s bits from 4 threads\n", parzen_isa(isa), c.name,
           sizeof(X) == 8 ? "double" : "float", error, allowed, same ? "equal" : "other");
  return !good || !same_store || !(apart <= allowed);
}

int main() {
  int failures = 0, done = 0;
  for (const auto& width : widths) {
    E = width[0], D = width[1];
    for (int64_t isa = 0; parzen_isa(isa); isa++)
      for (const Case& c : cases)
        if (*parzen_isa(isa)) {
          failures += check<float>(c, isa, 3e-5) + check<double>(c, isa, 1e-10);
          done += 2;
        }
  }
  printf("%d checks, %d failures\n", done, failures);
  return failures != 0;
}
