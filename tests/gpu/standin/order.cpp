/* tests/gpu/standin/order.cpp - which operation is before which, and who touched each byte last.
 *
 * Owns a map from addresses to the last write and the reads since, each as (stream, clock). An access that is not
 * before (its clock is not in the operation's vector clock) and collides is a race (Fidge 1988, Mattern 1989). A
 * kernel's accesses come one by one from the SIMT executor and are gathered as bits of pages first. Under card_lock. */
#include "../simt/simt.h"
#include "card.h"
#include <algorithm>
#include <cstring>
#include <unordered_map>

namespace {

struct stamp {
    uint32_t stream, clock;
    uint64_t number;    /* of the operation */
};
struct span {
    uintptr_t end;
    stamp write;        /* number 0: none */
    std::vector<stamp> reads;
};

constexpr unsigned PAGE_BITS = 10;
struct page { uint64_t read[16], write[16]; };

std::map<uintptr_t, span> &spans = *new std::map<uintptr_t, span>();
std::unordered_map<uintptr_t, page> &pages = *new std::unordered_map<uintptr_t, page>();
page *last_page;
uintptr_t last_page_at;
bool watching;

void watched(const void *p, size_t n, bool write)
{
    uintptr_t at = reinterpret_cast<uintptr_t>(p);
    while (n > 0) {
        uintptr_t which = at >> PAGE_BITS;
        if (!last_page || which != last_page_at) {
            auto found = pages.find(which);
            if (found == pages.end()) found = pages.emplace(which, page()).first;
            last_page = &found->second;
            last_page_at = which;
        }
        size_t offset = at & ((1u << PAGE_BITS) - 1), bit = offset & 63;
        size_t take = std::min({ n, (size_t)64 - bit, ((size_t)1 << PAGE_BITS) - offset });
        uint64_t mask = (take == 64 ? ~UINT64_C(0) : (UINT64_C(1) << take) - 1) << bit;
        (write ? last_page->write : last_page->read)[offset >> 6] |= mask;
        at += take;
        n -= take;
    }
}

/* A span begins exactly at `at`, if one covers it. */
void split(uintptr_t at)
{
    auto i = spans.lower_bound(at);
    if (i != spans.end() && i->first == at) return;
    if (i == spans.begin()) return;
    --i;
    if (i->second.end <= at) return;
    span right = i->second;
    i->second.end = at;
    spans.emplace(at, std::move(right));
}

bool before(const stamp &s, const card_op &op)
{
    return s.stream < op.vc.size() && s.clock <= op.vc[s.stream];
}

bool collide(card_op &op, const stamp &s, bool wrote, bool write, uintptr_t at, uintptr_t end)
{
    if (before(s, op)) return false;
    trace_found(STANDIN_RACE, "%s %s %zu bytes at 0x%zx that %s %s: no stream order, event or wait is between",
                trace_describe(op).c_str(), write ? "writes" : "reads", (size_t)(end - at), (size_t)at,
                trace_name(s.number).c_str(), wrote ? "writes" : "reads");
    return true;
}

/* False: a race was found (one sentence an operation is enough). */
bool judge(card_op &op, uintptr_t at, const span &s, uintptr_t end, bool write)
{
    if (s.write.number && collide(op, s.write, true, write, at, end)) return false;
    if (!write) return true;
    for (const stamp &r : s.reads)
        if (collide(op, r, false, true, at, end)) return false;
    return true;
}

void touch(card_op &op, uintptr_t at, uintptr_t end, bool write)
{
    stamp me = { op.stream->index, op.vc[op.stream->index], op.t.number };
    bool good = true;
    split(at);
    split(end);
    auto i = spans.lower_bound(at);
    if (write) {
        while (i != spans.end() && i->first < end) {
            good = good && judge(op, i->first, i->second, i->second.end, true);
            i = spans.erase(i);
        }
        spans.emplace(at, span{ end, me, {} });
        return;
    }
    while (at < end) {
        if (i == spans.end() || i->first > at) {
            uintptr_t gap_end = i == spans.end() ? end : std::min(end, i->first);
            spans.emplace(at, span{ gap_end, stamp(), { me } });
            at = gap_end;
            continue;
        }
        good = good && judge(op, i->first, i->second, i->second.end, false);
        auto &reads = i->second.reads;
        auto mine = std::find_if(reads.begin(), reads.end(), [&](const stamp &r) { return r.stream == me.stream; });
        if (mine == reads.end()) reads.push_back(me);
        else *mine = me;
        at = i->second.end;
        ++i;
    }
}

/* Runs of set bits in the pages, in order of address. */
template <typename F> void each_run(const std::vector<uintptr_t> &order, bool write, F f)
{
    uintptr_t begin = 0, end = 0;
    for (uintptr_t which : order) {
        const page &pg = pages[which];
        for (unsigned bit = 0; bit < 1u << PAGE_BITS;) {
            uint64_t word = (write ? pg.write : pg.read)[bit >> 6] >> (bit & 63);
            if (word == 0) {
                bit = (bit | 63) + 1;
                continue;
            }
            unsigned skip = (unsigned)__builtin_ctzll(word);
            word >>= skip;
            unsigned n = ~word ? (unsigned)__builtin_ctzll(~word) : 64;
            n = std::min(n, 64 - ((bit + skip) & 63));
            uintptr_t at = (which << PAGE_BITS) + bit + skip;
            if (at != end || begin == end) {
                if (end > begin) f(begin, end);
                begin = at;
            }
            end = at + n;
            bit += skip + n;
        }
    }
    if (end > begin) f(begin, end);
}

} // namespace

void order_join(order_clock &into, const order_clock &from)
{
    if (into.size() < from.size()) into.resize(from.size());
    for (size_t i = 0; i < from.size(); i++) into[i] = std::max(into[i], from[i]);
}

void order_begin(card_op &op) { (void)op; }

void order_watch_begin(void)
{
    if (card.cfg.unordered) return;
    watching = true;
    last_page = nullptr;
    pages.clear();
    simt_watch = watched;
}

void order_end(card_op &op)
{
    if (!watching) return;
    watching = false;
    simt_watch = nullptr;
    std::vector<uintptr_t> order;
    for (auto &p : pages) order.push_back(p.first);
    std::sort(order.begin(), order.end());
    each_run(order, false, [&](uintptr_t at, uintptr_t end) { touch(op, at, end, false); });
    each_run(order, true, [&](uintptr_t at, uintptr_t end) { touch(op, at, end, true); });
    pages.clear();
    last_page = nullptr;
}

void order_touch(card_op &op, const void *p, uint64_t n, bool write)
{
    uintptr_t at = reinterpret_cast<uintptr_t>(p);
    if (n && !card.cfg.unordered) touch(op, at, at + n, write);
}

void order_forget(const void *p, uint64_t n)
{
    uintptr_t at = reinterpret_cast<uintptr_t>(p);
    split(at);
    split(at + n);
    spans.erase(spans.lower_bound(at), spans.lower_bound(at + n));
}

void order_reset(void)
{
    spans.clear();
    pages.clear();
    last_page = nullptr;
    watching = false;
    simt_watch = nullptr;
}
