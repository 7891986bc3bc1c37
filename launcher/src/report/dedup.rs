//! Lines of many ranks on one console: the same line of several ranks becomes one, with their numbers.
//!
//! A line waits until all shown ranks have said it, [`WINDOW`] at most; what a rank says keeps its order.
use contract::ids::Rank;
use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    time::Duration,
};

/// Longest wait of a line.
pub(super) const WINDOW: Duration = Duration::from_millis(100);
/// Most lines that wait; beyond, the oldest goes on as it is.
const MOST: usize = 1024;

/// One line, of one rank or of several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Line {
    pub(super) ranks: BTreeSet<Rank>,
    pub(super) stderr: bool,
    pub(super) text: String,
}

/// Lines that wait for others like them.
#[derive(Debug, Default)]
pub(super) struct Deduplicator {
    /// In the order of their first arrivals; with a number that only grows and the time of that arrival.
    waiting: VecDeque<(u64, Duration, Line)>,
    next: u64,
    /// The number of the last waiting line of each rank.
    last: HashMap<Rank, u64>,
    /// Where equal lines wait.
    same: HashMap<(bool, String), Vec<u64>>,
    /// Ranks that a line may come from.
    ranks: usize,
}

impl Deduplicator {
    /// For the lines of this many ranks; lines of one rank never wait.
    pub(super) fn new(ranks: usize) -> Self {
        Deduplicator { ranks, ..Deduplicator::default() }
    }

    /// Takes a line in at `now` (since any fixed start); lines that need not wait any more.
    pub(super) fn push(&mut self, now: Duration, rank: Rank, stderr: bool, text: String) -> Vec<Line> {
        match self.joinable(rank, stderr, &text) {
            Some(number) => {
                if let Some((.., line)) = self.at(number) {
                    line.ranks.insert(rank);
                }
                self.last.insert(rank, number);
            }
            None => {
                self.same.entry((stderr, text.clone())).or_default().push(self.next);
                self.last.insert(rank, self.next);
                self.waiting.push_back((self.next, now, Line { ranks: [rank].into(), stderr, text }));
                self.next += 1;
            }
        }
        self.due(now)
    }

    /// Lines that have waited long enough at `now`.
    pub(super) fn due(&mut self, now: Duration) -> Vec<Line> {
        let mut due = Vec::new();
        while let Some((_, since, line)) = self.waiting.front() {
            if line.ranks.len() < self.ranks && now < *since + WINDOW && self.waiting.len() <= MOST {
                break;
            }
            due.extend(self.pop());
        }
        due
    }

    /// When the oldest line has waited long enough.
    pub(super) fn deadline(&self) -> Option<Duration> {
        self.waiting.front().map(|(_, since, _)| *since + WINDOW)
    }

    /// All that wait.
    pub(super) fn flush(&mut self) -> Vec<Line> {
        std::iter::from_fn(|| self.pop()).collect()
    }

    fn pop(&mut self) -> Option<Line> {
        let (number, _, line) = self.waiting.pop_front()?;
        self.last.retain(|_, last| *last != number);
        let key = (line.stderr, line.text.clone());
        if let Some(numbers) = self.same.get_mut(&key) {
            numbers.retain(|n| *n != number);
            if numbers.is_empty() {
                self.same.remove(&key);
            }
        }
        Some(line)
    }

    fn at(&mut self, number: u64) -> Option<&mut (u64, Duration, Line)> {
        let first = self.waiting.front()?.0;
        self.waiting.get_mut(number.checked_sub(first)? as usize)
    }

    /// The first waiting line like this one that stands after everything this rank has said.
    fn joinable(&self, rank: Rank, stderr: bool, text: &str) -> Option<u64> {
        if self.ranks < 2 {
            return None;
        }
        let after = self.last.get(&rank);
        let numbers = self.same.get(&(stderr, text.to_owned()))?;
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

    fn shown(lines: Vec<Line>) -> Vec<String> {
        let list = |ranks: &BTreeSet<Rank>| ranks.iter().map(Rank::to_string).collect::<Vec<_>>().join(",");
        lines.iter().map(|l| format!("{}:{}", list(&l.ranks), l.text)).collect()
    }

    #[test]
    fn equal_lines_become_one_in_each_ranks_order() {
        let mut c = Deduplicator::new(3);
        let mut push = |at, rank, text: &str| shown(c.push(ms(at), rank, false, text.to_owned()));
        assert!(push(0, 0, "a").is_empty());
        assert!(push(1, 0, "a").is_empty(), "said twice by one rank is two lines");
        assert!(push(2, 0, "b").is_empty());
        assert!(push(3, 1, "b").is_empty());
        assert!(push(4, 1, "a").is_empty(), "after rank 1's b, so a line of its own");
        assert_eq!(push(5, 2, "a"), Vec::<String>::new());
        assert_eq!(push(6, 2, "b"), Vec::<String>::new(), "complete, but older lines wait");
        assert_eq!(push(100, 2, "c"), ["0,2:a"]);
        assert_eq!(push(101, 0, "c"), ["0:a", "0,1,2:b"]);
        assert_eq!(shown(c.due(ms(104))), ["1:a"]);
        assert_eq!(c.deadline(), Some(ms(200)));
        assert_eq!(
            shown(c.push(ms(105), 1, false, "c".to_owned())),
            ["0,1,2:c"],
            "all said it: no more waiting"
        );
        assert_eq!(c.deadline(), None);
    }

    #[test]
    fn streams_are_told_apart_and_one_rank_never_waits() {
        let mut c = Deduplicator::new(2);
        assert!(c.push(ms(0), 0, false, "x".into()).is_empty());
        assert!(c.push(ms(0), 1, true, "x".into()).is_empty());
        assert_eq!(c.flush().len(), 2);
        let mut c = Deduplicator::new(1);
        assert_eq!(shown(c.push(ms(0), 7, false, "x".into())), ["7:x"]);
        assert_eq!(shown(c.push(ms(0), 7, false, "x".into())), ["7:x"]);
    }

    #[test]
    fn what_waits_is_bounded() {
        let mut c = Deduplicator::new(2);
        let out: usize = (0..MOST + 10).map(|i| c.push(ms(0), 0, false, i.to_string()).len()).sum();
        assert_eq!((out, c.flush().len()), (10, MOST));
        assert!(c.last.is_empty() && c.same.is_empty(), "nothing is kept of lines that went on");
    }

    proptest! {
        /// Every line of every rank comes out exactly once, in its rank's order, within the window.
        #[test]
        fn nothing_is_lost_or_reordered(
            ranks in 1usize..6,
            said in proptest::collection::vec((0u32..6, 0u8..3, any::<bool>(), 0u64..60), 0..200),
        ) {
            let mut collapse = Deduplicator::new(ranks);
            let (mut now, mut out, mut heard) = (ms(0), Vec::new(), HashMap::<Rank, Vec<(bool, String)>>::new());
            let mut waiting_since = VecDeque::new();
            for (rank, text, stderr, pause) in said {
                now += ms(pause);
                while let Some(at) = collapse.deadline().filter(|at| *at <= now) {
                    let due = collapse.due(at);
                    prop_assert!(!due.is_empty());
                    out.extend(due);
                }
                let rank = rank % ranks as u32;
                heard.entry(rank).or_default().push((stderr, text.to_string()));
                waiting_since.push_back(now);
                out.extend(collapse.push(now, rank, stderr, text.to_string()));
                prop_assert!(collapse.deadline().is_none_or(|at| at > now && at <= now + WINDOW));
            }
            out.extend(collapse.flush());
            let mut told = HashMap::<Rank, Vec<(bool, String)>>::new();
            for line in &out {
                prop_assert!(!line.ranks.is_empty());
                for rank in &line.ranks {
                    told.entry(*rank).or_default().push((line.stderr, line.text.clone()));
                }
            }
            prop_assert_eq!(told, heard);
            prop_assert!(collapse.last.is_empty() && collapse.same.is_empty());
        }
    }
}
