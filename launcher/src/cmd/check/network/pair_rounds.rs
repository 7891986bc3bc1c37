//! [`plan_rounds`]: plans which pairs of hosts `launch check --network` measures at the same time,
//! with each host in at most one pair.

/// The number of rounds in which pairs of hosts are measured at least, unless every pair of hosts
/// is measured in fewer rounds.
const MIN_ROUNDS: usize = 3;

/// Plans rounds of measurements between the hosts with the numbers 0 to `hosts` - 1, and returns
/// for each round the pairs to measure at the same time. The smaller host of each pair is first.
///
/// In each round, every host is in at most one pair, and no pair occurs twice. Up to four hosts are
/// paired with all others; in larger jobs, the number of rounds is the logarithm of the number of
/// hosts.
pub(super) fn plan_rounds(hosts: usize) -> Vec<Vec<(usize, usize)>> {
    if hosts < 2 {
        return Vec::new();
    }
    // The circle method: all players but one move on by one seat each round. With an odd number of
    // hosts, the seat of an absent host is a pause.
    let seats = hosts + hosts % 2;
    let rounds = (seats - 1).min(MIN_ROUNDS.max(hosts.ilog2() as usize));
    let player = |seat: usize, round: usize| match seat {
        0 => 0,
        seat => 1 + (seat - 1 + round) % (seats - 1),
    };
    let pair = |seat: usize, round: usize| {
        let (a, b) = (player(seat, round), player(seats - 1 - seat, round));
        (a.min(b), a.max(b))
    };
    // Rounds far from each other pair hosts with partners far from each other.
    let stride = ((seats - 1) / rounds).max(1);
    let round = |number: usize| {
        (0..seats / 2).map(|seat| pair(seat, number * stride)).filter(|pair| pair.1 < hosts).collect()
    };
    (0..rounds).map(round).collect()
}

/// Selects, from the pairs of hosts `wanted`, those that can be measured at the same time because
/// no host is in two of them. The order of the pairs decides. Each pair has its smaller host first.
pub(super) fn select_disjoint_pairs(wanted: impl IntoIterator<Item = (usize, usize)>) -> Vec<(usize, usize)> {
    let mut busy = std::collections::BTreeSet::new();
    let mut selected = Vec::new();
    for (a, b) in wanted {
        if !busy.contains(&a) && !busy.contains(&b) {
            busy.extend([a, b]);
            selected.push((a.min(b), a.max(b)));
        }
    }
    selected
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn each_host_talks_to_one_other_host_at_a_time() {
        for hosts in 2..70 {
            let rounds = plan_rounds(hosts);
            let pairs: Vec<_> = rounds.iter().flatten().copied().collect();
            assert_eq!(
                pairs.iter().collect::<BTreeSet<_>>().len(),
                pairs.len(),
                "{hosts} hosts repeat a pair"
            );
            for round in &rounds {
                let players: Vec<usize> = round.iter().flat_map(|(a, b)| [*a, *b]).collect();
                assert_eq!(players.iter().collect::<BTreeSet<_>>().len(), players.len(), "{hosts} hosts");
                assert_eq!(round.len(), hosts / 2);
                assert!(round.iter().all(|(a, b)| a < b && *b < hosts), "{round:?}");
            }
        }
        assert_eq!([2, 3, 4, 64, 1000].map(|hosts| plan_rounds(hosts).len()), [1, 3, 3, 6, 9]);
        assert_eq!(plan_rounds(1), Vec::<Vec<_>>::new());
    }

    #[test]
    fn tests_that_share_a_host_are_not_selected_together() {
        assert_eq!(select_disjoint_pairs([(3, 1), (1, 2), (0, 2), (3, 4)]), [(1, 3), (0, 2)]);
    }
}
