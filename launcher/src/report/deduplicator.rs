//! [`Deduplicator`]: merges equal lines of several ranks, so that each is shown once with the
//! numbers of the ranks.
//!
//! A line waits until all shown ranks have printed it, but no longer than [`MERGE_WINDOW`]. The
//! lines of each rank keep their order.
use jobspec::ids::Rank;
use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    time::Duration,
};

/// The longest time that an output line of a worker waits for equal lines of other ranks.
pub(super) const MERGE_WINDOW: Duration = Duration::from_millis(100);
/// The largest number of output lines that wait for equal lines of other ranks. If more lines wait,
/// the oldest one is shown immediately.
const MAX_WAITING_LINES: usize = 1024;

/// An output line, with all ranks that have printed it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MergedLine {
    pub(super) ranks: BTreeSet<Rank>,
    pub(super) stderr: bool,
    pub(super) text: String,
}

/// Merges equal output lines of several ranks, so that each is shown once with the numbers of the
/// ranks. Each line waits for equal lines of other ranks for up to [`MERGE_WINDOW`].
#[derive(Debug, Default)]
pub(super) struct Deduplicator {
    /// The waiting lines in the order of first arrival. Each entry has a consecutive number and the
    /// time at which the line first arrived.
    waiting: VecDeque<(u64, Duration, MergedLine)>,
    next_number: u64,
    /// Maps each rank to the number of the most recent waiting line that the rank printed.
    last_of_rank: HashMap<Rank, u64>,
    /// Maps each waiting line, as a pair of whether the line is from stderr and its text, to the
    /// line's numbers in `waiting`.
    numbers_of_text: HashMap<(bool, String), Vec<u64>>,
    /// The number of ranks whose output is shown.
    shown_ranks: usize,
}

impl Deduplicator {
    /// Creates a deduplicator without waiting lines for a run that shows the output of
    /// `shown_ranks` ranks. With a single rank, lines never wait.
    pub(super) fn new(shown_ranks: usize) -> Self {
        Deduplicator { shown_ranks, ..Deduplicator::default() }
    }

    /// Adds the output line `text` of rank `rank` to the lines that wait for equal lines of other
    /// ranks. `now` is the time of arrival, measured from any fixed start. Returns the lines to
    /// show at `now`, which may include the added line.
    pub(super) fn push_line(
        &mut self,
        now: Duration,
        rank: Rank,
        stderr: bool,
        text: String,
    ) -> Vec<MergedLine> {
        match self.find_equal_line(rank, stderr, &text) {
            Some(number) => {
                if let Some((.., line)) = self.find_waiting_line(number) {
                    line.ranks.insert(rank);
                }
                self.last_of_rank.insert(rank, number);
            }
            None => {
                self.numbers_of_text.entry((stderr, text.clone())).or_default().push(self.next_number);
                self.last_of_rank.insert(rank, self.next_number);
                self.waiting.push_back((
                    self.next_number,
                    now,
                    MergedLine { ranks: [rank].into(), stderr, text },
                ));
                self.next_number += 1;
            }
        }
        self.take_due_lines(now)
    }

    /// Removes from the waiting lines those that need not wait for equal lines of other ranks any
    /// longer at the time `now`, and returns them.
    ///
    /// A line is due if all ranks have printed the line or if the line has waited for
    /// [`MERGE_WINDOW`]. A due line still waits for older lines.
    pub(super) fn take_due_lines(&mut self, now: Duration) -> Vec<MergedLine> {
        let mut due = Vec::new();
        while let Some((_, since, line)) = self.waiting.front() {
            if line.ranks.len() < self.shown_ranks
                && now < *since + MERGE_WINDOW
                && self.waiting.len() <= MAX_WAITING_LINES
            {
                break;
            }
            due.extend(self.pop_oldest_line());
        }
        due
    }

    /// Returns the time at which the oldest waiting line must be shown, or `None` if no line waits.
    pub(super) fn next_line_deadline(&self) -> Option<Duration> {
        self.waiting.front().map(|(_, since, _)| *since + MERGE_WINDOW)
    }

    /// Removes and returns all lines that wait for equal lines of other ranks.
    pub(super) fn take_all_lines(&mut self) -> Vec<MergedLine> {
        std::iter::from_fn(|| self.pop_oldest_line()).collect()
    }

    /// Removes and returns the line that has waited longest for equal lines of other ranks.
    fn pop_oldest_line(&mut self) -> Option<MergedLine> {
        let (number, _, line) = self.waiting.pop_front()?;
        self.last_of_rank.retain(|_, last| *last != number);
        let key = (line.stderr, line.text.clone());
        if let Some(numbers) = self.numbers_of_text.get_mut(&key) {
            numbers.retain(|n| *n != number);
            if numbers.is_empty() {
                self.numbers_of_text.remove(&key);
            }
        }
        Some(line)
    }

    /// Returns the waiting line with the number `number`, or `None` if it no longer waits.
    fn find_waiting_line(&mut self, number: u64) -> Option<&mut (u64, Duration, MergedLine)> {
        let first = self.waiting.front()?.0;
        self.waiting.get_mut(number.checked_sub(first)? as usize)
    }

    /// Returns the number of the waiting output line with which a new line of a rank can be merged
    /// because their texts are equal. This is the first waiting line with equal stream and text
    /// that arrived after the last line of `rank`. Returns `None` if there is no such line.
    fn find_equal_line(&self, rank: Rank, stderr: bool, text: &str) -> Option<u64> {
        if self.shown_ranks < 2 {
            return None;
        }
        let after = self.last_of_rank.get(&rank);
        let numbers = self.numbers_of_text.get(&(stderr, text.to_owned()))?;
        numbers.iter().copied().find(|number| after.is_none_or(|after| number > after))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    /// Formats each line as `RANKS:TEXT`.
    fn format_lines(lines: Vec<MergedLine>) -> Vec<String> {
        let list = |ranks: &BTreeSet<Rank>| ranks.iter().map(Rank::to_string).collect::<Vec<_>>().join(",");
        lines.iter().map(|l| format!("{}:{}", list(&l.ranks), l.text)).collect()
    }

    #[test]
    fn equal_lines_are_merged_in_the_order_of_each_rank() {
        let mut dedup = Deduplicator::new(3);
        let mut push =
            |at, rank, text: &str| format_lines(dedup.push_line(ms(at), rank, false, text.to_owned()));
        assert!(push(0, 0, "a").is_empty());
        assert!(push(1, 0, "a").is_empty(), "two equal lines of one rank stay two lines");
        assert!(push(2, 0, "b").is_empty());
        assert!(push(3, 1, "b").is_empty());
        assert!(push(4, 1, "a").is_empty(), "it follows the b of rank 1, so it is a separate line");
        assert_eq!(push(5, 2, "a"), Vec::<String>::new());
        assert_eq!(push(6, 2, "b"), Vec::<String>::new(), "complete, but older lines wait");
        assert_eq!(push(100, 2, "c"), ["0,2:a"]);
        assert_eq!(push(101, 0, "c"), ["0:a", "0,1,2:b"]);
        assert_eq!(format_lines(dedup.take_due_lines(ms(104))), ["1:a"]);
        assert_eq!(dedup.next_line_deadline(), Some(ms(200)));
        assert_eq!(
            format_lines(dedup.push_line(ms(105), 1, false, "c".to_owned())),
            ["0,1,2:c"],
            "all ranks have printed it"
        );
        assert_eq!(dedup.next_line_deadline(), None);
    }

    #[test]
    fn stdout_and_stderr_are_not_merged_and_one_rank_never_waits() {
        let mut dedup = Deduplicator::new(2);
        assert!(dedup.push_line(ms(0), 0, false, "x".into()).is_empty());
        assert!(dedup.push_line(ms(0), 1, true, "x".into()).is_empty());
        assert_eq!(dedup.take_all_lines().len(), 2);
        let mut dedup = Deduplicator::new(1);
        assert_eq!(format_lines(dedup.push_line(ms(0), 7, false, "x".into())), ["7:x"]);
        assert_eq!(format_lines(dedup.push_line(ms(0), 7, false, "x".into())), ["7:x"]);
    }

    #[test]
    fn the_number_of_waiting_lines_is_bounded() {
        let mut dedup = Deduplicator::new(2);
        let out: usize =
            (0..MAX_WAITING_LINES + 10).map(|i| dedup.push_line(ms(0), 0, false, i.to_string()).len()).sum();
        assert_eq!((out, dedup.take_all_lines().len()), (10, MAX_WAITING_LINES));
        assert!(
            dedup.last_of_rank.is_empty() && dedup.numbers_of_text.is_empty(),
            "shown lines are forgotten"
        );
    }

    proptest! {
        /// Checks that every line of every rank is shown exactly once and within the window, and
        /// that the lines of each rank keep their order.
        #[test]
        fn no_line_is_lost_or_reordered(
            ranks in 1usize..6,
            printed in proptest::collection::vec((0u32..6, 0u8..3, any::<bool>(), 0u64..60), 0..200),
        ) {
            let mut dedup = Deduplicator::new(ranks);
            let (mut now, mut out, mut expected) = (ms(0), Vec::new(), HashMap::<Rank, Vec<(bool, String)>>::new());
            for (rank, text, stderr, pause) in printed {
                now += ms(pause);
                while let Some(at) = dedup.next_line_deadline().filter(|at| *at <= now) {
                    let due = dedup.take_due_lines(at);
                    prop_assert!(!due.is_empty());
                    out.extend(due);
                }
                let rank = rank % ranks as u32;
                expected.entry(rank).or_default().push((stderr, text.to_string()));
                out.extend(dedup.push_line(now, rank, stderr, text.to_string()));
                prop_assert!(dedup.next_line_deadline().is_none_or(|at| at > now && at <= now + MERGE_WINDOW));
            }
            out.extend(dedup.take_all_lines());
            let mut shown = HashMap::<Rank, Vec<(bool, String)>>::new();
            for line in &out {
                prop_assert!(!line.ranks.is_empty());
                for rank in &line.ranks {
                    shown.entry(*rank).or_default().push((line.stderr, line.text.clone()));
                }
            }
            prop_assert_eq!(shown, expected);
            prop_assert!(dedup.last_of_rank.is_empty() && dedup.numbers_of_text.is_empty());
        }
    }
}
