//! [`Series`]: a curve over the optimizer steps of a run, reduced to a limited number of points but
//! with its extreme values.
use serde::Serialize;

/// The largest number of buckets (ranges of consecutive steps) into which a curve is divided.
pub(crate) const MAX_BUCKETS: usize = 1024;

/// The value of a curve at one optimizer step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Point {
    pub(crate) step: u64,
    pub(crate) value: f64,
}

/// The points of a range of consecutive steps, of which at most four are kept: the first, the last,
/// the smallest and the largest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Bucket {
    /// The number of the bucket: its steps divided by the width of the series.
    index: u64,
    /// The point with the smallest step. If several points have this step, the one added first.
    first: Point,
    /// The point with the largest step. If several points have this step, the one added last.
    last: Point,
    /// A point with the smallest value.
    min: Point,
    /// A point with the largest value.
    max: Point,
}

/// A curve: the values of a quantity over the optimizer steps of a run, downsampled while they
/// arrive. Steps are divided into buckets of equal width. The width doubles when there are too many
/// buckets.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    /// The number of steps in a bucket, a power of two.
    width: u64,
    /// The buckets that contain points, in ascending order of their indexes.
    buckets: Vec<Bucket>,
    /// A number that increases when other buckets than the last one change.
    generation: u64,
}

/// The part of a curve that is sent to a reader, such as a browser, because the reader does not
/// have it yet.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct SeriesUpdate {
    /// The generation of the series.
    generation: u64,
    /// The position in the list of buckets from which the reader replaces its buckets.
    from: usize,
    /// The new buckets. A bucket is a list of steps and values in turn, in ascending order of the
    /// steps.
    buckets: Vec<Vec<f64>>,
}

/// How much of a curve a reader, such as a browser, has received, so that the next update contains
/// only the rest.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct SeriesReadPosition {
    generation: u64,
    buckets: usize,
}

impl Default for Series {
    fn default() -> Series {
        Series { width: 1, buckets: Vec::new(), generation: 1 }
    }
}

impl Bucket {
    /// Creates a bucket (the points of a range of steps) with one point.
    fn new(index: u64, point: Point) -> Bucket {
        Bucket { index, first: point, last: point, min: point, max: point }
    }

    /// Extends this bucket (range of steps) by the points of the bucket `later`, and keeps the
    /// first, last, smallest and largest point of both.
    fn merge(&mut self, later: &Bucket) {
        if later.first.step < self.first.step {
            self.first = later.first;
        }
        if later.last.step >= self.last.step {
            self.last = later.last;
        }
        if later.min.value < self.min.value {
            self.min = later.min;
        }
        if later.max.value > self.max.value {
            self.max = later.max;
        }
    }

    /// Lists the points that the bucket keeps in ascending order of their steps, each point once.
    pub(crate) fn list_points(&self) -> Vec<Point> {
        let (first, last) = (self.first, self.last);
        let mut middle = [self.min, self.max];
        middle.sort_by_key(|point| point.step);
        let mut points = vec![first];
        points.extend(middle.into_iter().chain([last]));
        points.dedup();
        points
    }
}

impl Series {
    /// Adds the point (`step`, `value`) to the curve, and merges it into the bucket (range of
    /// steps) to which the step belongs. Ignores a value that is not finite.
    pub(crate) fn add_value(&mut self, step: u64, value: f64) {
        if !value.is_finite() {
            return;
        }
        let bucket = Bucket::new(step / self.width, Point { step, value });
        match self.buckets.last_mut() {
            Some(last) if last.index == bucket.index => last.merge(&bucket),
            Some(last) if last.index > bucket.index => self.add_earlier_bucket(&bucket),
            _ => self.buckets.push(bucket),
        }
        while self.buckets.len() > MAX_BUCKETS {
            self.double_bucket_width();
        }
    }

    /// Adds the points in `bucket` to an earlier part of the curve, because a run that resumes from
    /// an older checkpoint repeats steps.
    fn add_earlier_bucket(&mut self, bucket: &Bucket) {
        self.generation += 1;
        match self.buckets.binary_search_by_key(&bucket.index, |b| b.index) {
            Ok(at) => self.buckets[at].merge(bucket),
            Err(at) => self.buckets.insert(at, *bucket),
        }
    }

    /// Doubles the number of steps per bucket (range of consecutive steps), and merges neighboring
    /// buckets in pairs.
    fn double_bucket_width(&mut self) {
        self.generation += 1;
        self.width = self.width.saturating_mul(2);
        let mut merged: Vec<Bucket> = Vec::with_capacity(self.buckets.len() / 2 + 1);
        for bucket in &self.buckets {
            let bucket = Bucket { index: bucket.index / 2, ..*bucket };
            match merged.last_mut() {
                Some(last) if last.index == bucket.index => last.merge(&bucket),
                _ => merged.push(bucket),
            }
        }
        self.buckets = merged;
    }

    /// Returns the point of the curve with the largest step.
    #[cfg(test)]
    pub(crate) fn last_point(&self) -> Option<Point> {
        self.buckets.last().map(|bucket| bucket.last)
    }

    /// Returns whether the curve has no points yet.
    pub(crate) fn is_empty(&self) -> bool {
        self.buckets.is_empty()
    }

    /// Returns the points that the curve keeps, in ascending order of their steps.
    pub(crate) fn list_points(&self) -> Vec<Point> {
        self.buckets.iter().flat_map(Bucket::list_points).collect()
    }

    /// Returns the points of the curve that a reader does not have yet, and moves `position`, the
    /// reader's position, to the end. Returns `None` if the series is empty.
    pub(crate) fn take_update(&self, position: &mut SeriesReadPosition) -> Option<SeriesUpdate> {
        if self.buckets.is_empty() {
            return None;
        }
        // The last bucket of the reader may have grown since.
        let from = match position.generation == self.generation {
            true => position.buckets.saturating_sub(1),
            false => 0,
        };
        *position = SeriesReadPosition { generation: self.generation, buckets: self.buckets.len() };
        let flatten =
            |b: &Bucket| b.list_points().iter().flat_map(|p| [p.step as f64, p.value]).collect::<Vec<f64>>();
        let buckets = self.buckets[from.min(self.buckets.len())..].iter().map(flatten).collect();
        Some(SeriesUpdate { generation: self.generation, from, buckets })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn build(points: &[(u64, f64)]) -> Series {
        let mut series = Series::default();
        points.iter().for_each(|(step, value)| series.add_value(*step, *value));
        series
    }

    /// Applies the updates of a series to the buckets of a reader, as the page does.
    fn apply(buckets: &mut Vec<Vec<f64>>, update: Option<SeriesUpdate>) {
        let Some(update) = update else { return };
        buckets.truncate(update.from);
        buckets.extend(update.buckets);
    }

    #[test]
    fn a_million_steps_keep_a_spike_of_one_step() {
        let mut series = Series::default();
        for step in 1..=1_000_000u64 {
            series.add_value(step, if step == 654_321 { 99.0 } else { 2.0 + 1.0 / step as f64 });
        }
        let points = series.list_points();
        assert!(series.buckets.len() <= MAX_BUCKETS && points.len() <= 4 * MAX_BUCKETS, "{}", points.len());
        assert!(series.buckets.len() > MAX_BUCKETS / 3, "{}", series.buckets.len());
        assert!(points.contains(&Point { step: 654_321, value: 99.0 }));
        assert_eq!(points[0], Point { step: 1, value: 3.0 });
        assert_eq!(series.last_point().map(|p| p.step), Some(1_000_000));
    }

    #[test]
    fn values_that_are_not_finite_are_ignored_and_extreme_steps_accepted() {
        let series = build(&[(1, f64::NAN), (2, f64::INFINITY), (u64::MAX, 1.0), (0, 2.0)]);
        assert_eq!(series.list_points().len(), 2);
        let spread: Vec<(u64, f64)> = (0..64).map(|bit| (1u64 << bit, f64::from(bit))).collect();
        let mut series = build(&spread);
        (0..5000).for_each(|n| series.add_value(u64::MAX - n * (1 << 50), 0.5));
        assert!(series.buckets.len() <= MAX_BUCKETS);
    }

    proptest! {
        #[test]
        fn the_first_last_smallest_and_largest_points_are_kept(
            values in prop::collection::vec((0u64..200_000, -1e9f64..1e9), 1..6000),
        ) {
            let points = build(&values).list_points();
            prop_assert!(points.len() <= 4 * MAX_BUCKETS);
            let kept = |value: f64| points.iter().any(|p| p.value == value);
            prop_assert!(kept(values.iter().map(|v| v.1).fold(f64::INFINITY, f64::min)));
            prop_assert!(kept(values.iter().map(|v| v.1).fold(f64::NEG_INFINITY, f64::max)));
            let first = values.iter().map(|v| v.0).min();
            let last = values.iter().map(|v| v.0).max();
            prop_assert_eq!((points.first().map(|p| p.step), points.last().map(|p| p.step)), (first, last));
            // No point is made up, and steps ascend.
            prop_assert!(points.iter().all(|p| values.contains(&(p.step, p.value))));
            prop_assert!(points.windows(2).all(|w| w[0].step <= w[1].step));
        }

        #[test]
        fn updates_lead_to_the_buckets_of_the_series(
            values in prop::collection::vec((0u64..5_000, -1e3f64..1e3), 1..3000),
            every in 1usize..700,
        ) {
            let (mut series, mut position, mut buckets) = (Series::default(), SeriesReadPosition::default(), vec![]);
            for (n, (step, value)) in values.iter().enumerate() {
                series.add_value(*step, *value);
                if n % every == 0 {
                    apply(&mut buckets, series.take_update(&mut position));
                }
            }
            apply(&mut buckets, series.take_update(&mut position));
            let mut complete = vec![];
            apply(&mut complete, series.take_update(&mut SeriesReadPosition::default()));
            prop_assert_eq!(buckets, complete);
        }
    }
}
