//! What a rank says about the collective that it calls, and the checks that its arguments fit and that all ranks say the same.
use std::ops::Range;

/// Where a rank stands in its group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) rank: usize,
    pub(crate) world: usize,
}

/// Which collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    AllGather = 1,
    ReduceScatterFold,
    ReduceScatter,
    AllReduce,
    Broadcast,
    AllToAll,
    AllGatherBytes,
    Barrier,
    Common,
}

impl Kind {
    const ALL: [Kind; 9] = [
        Kind::AllGather,
        Kind::ReduceScatterFold,
        Kind::ReduceScatter,
        Kind::AllReduce,
        Kind::Broadcast,
        Kind::AllToAll,
        Kind::AllGatherBytes,
        Kind::Barrier,
        Kind::Common,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::AllGather => "all_gather",
            Kind::ReduceScatterFold => "reduce_scatter_fold",
            Kind::ReduceScatter => "reduce_scatter",
            Kind::AllReduce => "all_reduce",
            Kind::Broadcast => "broadcast",
            Kind::AllToAll => "all_to_all",
            Kind::AllGatherBytes => "all_gather_bytes",
            Kind::Barrier => "barrier",
            Kind::Common => "common",
        }
    }
}

/// One call of a collective, as far as every rank must say the same about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) kind: Kind,
    /// How many collectives this rank called before.
    pub(crate) seq: u64,
    /// Elements that all ranks must agree about; 0 where they need not.
    size: u64,
    /// Hash of the other arguments that all ranks must agree about: counts, root.
    digest: u64,
}

impl Call {
    fn new(kind: Kind, size: usize, agreed: impl IntoIterator<Item = usize>) -> Self {
        Call { kind, seq: 0, size: size as u64, digest: digest(agreed) }
    }

    /// The same call for elements of so many bytes, which all ranks must agree about.
    pub(crate) fn of_size(self, bytes: usize) -> Self {
        Call { digest: digest([self.digest as usize, bytes]), ..self }
    }

    /// The same call with its number.
    pub(crate) fn numbered(self, seq: u64) -> Self {
        Call { seq, ..self }
    }

    /// Elements of any type, the same on both sides: (length, bytes of an element).
    pub(crate) fn all_gather_of(
        at: Place,
        recv: (usize, usize),
        send: (usize, usize),
        counts: &[usize],
    ) -> Result<Self, String> {
        if recv.1 != send.1 {
            return Err(format!("all_gather: send has elements of {} bytes, recv of {}", send.1, recv.1));
        }
        Ok(Call::all_gather(at, recv.0, send.0, counts)?.of_size(recv.1))
    }

    fn all_gather(at: Place, recv: usize, send: usize, counts: &[usize]) -> Result<Self, String> {
        let kind = Kind::AllGather;
        let total = total(kind, "counts", counts, at.world)?;
        same(kind, "send", send, "counts[rank]", counts[at.rank])?;
        same(kind, "recv", recv, "the sum of counts", total)?;
        Ok(Call::new(kind, total, counts.iter().copied()))
    }

    pub(crate) fn reduce_scatter_fold(
        at: Place,
        partials: impl Iterator<Item = usize>,
        counts: &[usize],
    ) -> Result<Self, String> {
        let kind = Kind::ReduceScatterFold;
        let total = total(kind, "counts", counts, at.world)?;
        for partial in partials {
            same(kind, "a partial", partial, "the sum of counts", total)?;
        }
        Ok(Call::new(kind, total, counts.iter().copied()))
    }

    pub(crate) fn reduce_scatter(
        at: Place,
        recv: usize,
        send: usize,
        counts: &[usize],
    ) -> Result<Self, String> {
        let kind = Kind::ReduceScatter;
        let total = total(kind, "counts", counts, at.world)?;
        same(kind, "recv", recv, "counts[rank]", counts[at.rank])?;
        same(kind, "send", send, "the sum of counts", total)?;
        Ok(Call::new(kind, total, counts.iter().copied()))
    }

    pub(crate) fn all_reduce(len: usize) -> Self {
        Call::new(Kind::AllReduce, len, [])
    }

    pub(crate) fn broadcast(at: Place, len: usize, root: usize) -> Result<Self, String> {
        if root >= at.world {
            return Err(format!("broadcast: root is {root} in a group of {} ranks", at.world));
        }
        Ok(Call::new(Kind::Broadcast, len, [root]))
    }

    /// Elements of any type, the same on both sides: (length, bytes of an element).
    pub(crate) fn all_to_all_of(
        at: Place,
        recv: (usize, usize),
        recv_counts: &[usize],
        send: (usize, usize),
        send_counts: &[usize],
    ) -> Result<Self, String> {
        if recv.1 != send.1 {
            return Err(format!("all_to_all: send has elements of {} bytes, recv of {}", send.1, recv.1));
        }
        Ok(Call::all_to_all(at, recv.0, recv_counts, send.0, send_counts)?.of_size(recv.1))
    }

    fn all_to_all(
        at: Place,
        recv: usize,
        recv_counts: &[usize],
        send: usize,
        send_counts: &[usize],
    ) -> Result<Self, String> {
        let kind = Kind::AllToAll;
        same(
            kind,
            "recv",
            recv,
            "the sum of recv_counts",
            total(kind, "recv_counts", recv_counts, at.world)?,
        )?;
        same(
            kind,
            "send",
            send,
            "the sum of send_counts",
            total(kind, "send_counts", send_counts, at.world)?,
        )?;
        pair(at.rank, at.rank, send_counts[at.rank] as u64, recv_counts[at.rank] as u64)?;
        Ok(Call::new(kind, 0, []))
    }

    pub(crate) fn all_gather_bytes(len: usize) -> Result<Self, String> {
        if len > crate::MAX_GATHER_BYTES {
            let cap = crate::MAX_GATHER_BYTES;
            return Err(format!("all_gather_bytes: {len} bytes; at most {cap} per rank"));
        }
        Ok(Call::new(Kind::AllGatherBytes, 0, []))
    }

    pub(crate) fn common(at: Place, counts: &[usize], element: usize) -> Result<Self, String> {
        let total = total(Kind::Common, "counts", counts, at.world)?;
        Ok(Call::new(Kind::Common, total, counts.iter().copied()).of_size(element))
    }

    pub(crate) fn barrier() -> Self {
        Call::new(Kind::Barrier, 0, [])
    }

    /// As three words, for comparing and for shared memory. The kind takes the low byte of the first.
    pub(crate) fn words(&self) -> [u64; 3] {
        [self.seq << 8 | self.kind as u64, self.size, self.digest]
    }

    /// Fails with both sides' calls when `peer` says something else.
    pub(crate) fn agree(&self, rank: usize, peer: usize, theirs: [u64; 3]) -> Result<(), String> {
        let ours = self.words();
        if ours == theirs {
            return Ok(());
        }
        let hint = if ours[..2] == theirs[..2] { " (the counts or the root differ)" } else { "" };
        Err(format!("rank {rank} calls {}, rank {peer} calls {}{hint}", describe(ours), describe(theirs)))
    }
}

/// A call in words: `all_gather (call 17, 1024 elements)`.
fn describe(words: [u64; 3]) -> String {
    let code = words[0] & 0xff;
    let name = Kind::ALL.iter().find(|k| **k as u64 == code).map_or("an unknown collective", |k| k.name());
    format!("{name} (call {}, {} elements)", words[0] >> 8, words[1])
}

/// Fails unless what `from` sends to `to` is what `to` expects from it.
pub(crate) fn pair(from: usize, to: usize, sent: u64, expected: u64) -> Result<(), String> {
    if sent == expected {
        return Ok(());
    }
    Err(format!(
        "all_to_all: rank {from} sends {sent} elements to rank {to}, which expects {expected} from it"
    ))
}

/// First index of every rank's part.
pub(crate) fn starts(counts: &[usize]) -> Vec<usize> {
    counts
        .iter()
        .scan(0, |at, &n| {
            let start = *at;
            *at += n;
            Some(start)
        })
        .collect()
}

/// Rank r's share of `len` elements cut as evenly as possible.
pub(crate) fn share(len: usize, rank: usize, world: usize) -> Range<usize> {
    let (each, rest) = (len / world, len % world);
    let start = each * rank + rest.min(rank);
    start..start + each + usize::from(rank < rest)
}

/// `ranks 1, 3 of 4`.
pub(crate) fn ranks(list: &[usize], world: usize) -> String {
    let names: Vec<String> = list.iter().map(usize::to_string).collect();
    let word = if list.len() == 1 { "rank" } else { "ranks" };
    format!("{word} {} of {world}", names.join(", "))
}

fn total(kind: Kind, what: &str, counts: &[usize], world: usize) -> Result<usize, String> {
    if counts.len() != world {
        let (name, n) = (kind.name(), counts.len());
        return Err(format!("{name}: {what} has {n} entries in a group of {world} ranks"));
    }
    counts
        .iter()
        .try_fold(0usize, |sum, &n| sum.checked_add(n))
        .filter(|&sum| sum <= isize::MAX as usize / size_of::<f32>())
        .ok_or_else(|| format!("{}: the sum of {what} overflows", kind.name()))
}

fn same(kind: Kind, what: &str, got: usize, of: &str, want: usize) -> Result<(), String> {
    if got == want {
        return Ok(());
    }
    Err(format!("{}: {what} has {got} elements, {of} is {want}", kind.name()))
}

/// Multiply-xor hash of a list (finaliser of splitmix64): equal lists agree, different ones all but surely don't.
fn digest(list: impl IntoIterator<Item = usize>) -> u64 {
    list.into_iter().fold(0x9e37_79b9_7f4a_7c15, |h, v| {
        let mut x = (h.rotate_left(5) ^ v as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: Place = Place { rank: 1, world: 3 };

    #[test]
    fn arguments_are_checked_with_names_and_numbers() {
        let e = Call::all_gather(AT, 6, 2, &[1, 3, 2]).unwrap_err();
        assert_eq!(e, "all_gather: send has 2 elements, counts[rank] is 3");
        let e = Call::all_gather(AT, 7, 3, &[1, 3, 2]).unwrap_err();
        assert_eq!(e, "all_gather: recv has 7 elements, the sum of counts is 6");
        let e = Call::reduce_scatter(AT, 3, 6, &[1, 3]).unwrap_err();
        assert_eq!(e, "reduce_scatter: counts has 2 entries in a group of 3 ranks");
        let e = Call::reduce_scatter_fold(AT, [6, 5].into_iter(), &[1, 3, 2]).unwrap_err();
        assert_eq!(e, "reduce_scatter_fold: a partial has 5 elements, the sum of counts is 6");
        let e = Call::all_gather(AT, 0, 0, &[usize::MAX, 1, 1]).unwrap_err();
        assert_eq!(e, "all_gather: the sum of counts overflows");
        assert!(Call::broadcast(AT, 1, 3).unwrap_err().contains("root is 3"));
        let e = Call::all_to_all(AT, 3, &[1, 1, 1], 4, &[1, 2, 1]).unwrap_err();
        assert!(e.contains("rank 1 sends 2 elements to rank 1"), "{e}");
        assert!(Call::all_gather_bytes(crate::MAX_GATHER_BYTES + 1).is_err());
    }

    #[test]
    fn disagreement_names_both_sides() {
        let ours = Call::all_reduce(5).numbered(17);
        assert_eq!(ours.agree(0, 2, ours.words()), Ok(()));
        let e = ours.agree(0, 2, Call::barrier().numbered(17).words()).unwrap_err();
        assert_eq!(
            e,
            "rank 0 calls all_reduce (call 17, 5 elements), rank 2 calls barrier (call 17, 0 elements)"
        );
        let a = Call::all_gather(AT, 6, 3, &[1, 3, 2]).unwrap();
        let b = Call::all_gather(AT, 6, 3, &[2, 3, 1]).unwrap();
        assert!(a.agree(1, 0, b.words()).unwrap_err().ends_with("(the counts or the root differ)"));
        assert!(a.agree(1, 0, [u64::MAX; 3]).unwrap_err().contains("an unknown collective"));
    }

    #[test]
    fn shares_cover_everything_once() {
        for world in 1..=9 {
            for len in 0..40 {
                let mut at = 0;
                for rank in 0..world {
                    let r = share(len, rank, world);
                    assert_eq!(r.start, at);
                    at = r.end;
                }
                assert_eq!(at, len);
            }
        }
    }
}
