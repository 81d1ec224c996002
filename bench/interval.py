"""What the scripts of paired measurements share."""
import random
import statistics


def interval(values, seed=1, resamples=2000):
    """95 % interval of the median: percentile bootstrap."""
    if not values:
        return None, None
    r = random.Random(seed)
    medians = sorted(statistics.median(r.choices(values, k=len(values))) for _ in range(resamples))
    return medians[int(resamples * 0.025)], medians[int(resamples * 0.975) - 1]
