//! [`CollectiveCall`]: a summary of one call of a collective, which ranks compare to detect that
//! they made different calls.
use crate::{
    call_error::{ArgumentError, CallMismatch, CallSummary, TransferUnit},
    collective_kind::CollectiveKind,
};
use std::{fmt, ops::Range};

type Result<T> = std::result::Result<T, ArgumentError>;

/// The number of a rank in its group of communicating ranks, and the number of ranks in the group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupPosition {
    pub(crate) rank: usize,
    pub(crate) world: usize,
}

/// The length (in elements) and the element size (in bytes) of a buffer that a caller passes to a
/// collective.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BufferShape {
    /// Number of elements in the buffer.
    pub(crate) len: usize,
    /// Size of one element in bytes.
    pub(crate) element_bytes: usize,
}

impl BufferShape {
    /// Returns the shape (number of elements and size of an element) of the buffer `view`.
    pub(crate) fn new(view: device::View<'_>) -> Self {
        BufferShape { len: view.len(), element_bytes: view.dtype().size() }
    }

    /// Returns the shape of a buffer of `bytes` bytes whose elements are single bytes.
    pub(crate) fn from_byte_count(bytes: &[u8]) -> Self {
        BufferShape { len: bytes.len(), element_bytes: 1 }
    }
}

/// A summary of one call of a collective: its kind, its number in the sequence of calls, and the
/// arguments that must be equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CollectiveCall {
    pub(crate) kind: CollectiveKind,
    /// Call number: how many collectives this rank had called before.
    pub(crate) number: u64,
    /// Number of elements, which must be equal on all ranks. 0 for collectives in which ranks may
    /// pass different numbers of elements.
    elements: u64,
    /// Hash of the other arguments that must be equal on all ranks: counts, root and element size.
    digest: u64,
    /// Size of an element in bytes, for messages.
    element_bytes: usize,
}

/// Formats the collective and the call number as `barrier (call 12)`, the form in which all
/// messages name a call.
impl fmt::Display for CollectiveCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (call {})", self.kind, self.number)
    }
}

impl CollectiveCall {
    /// Summarizes a call of the collective `kind` on `elements` elements, so that ranks can check
    /// that all ranks made the same call. The numbers `agreed`, arguments that must be equal on all
    /// ranks, are included as a hash. Calls that differ in either do not match. The call number is
    /// 0 until it is set.
    fn new(kind: CollectiveKind, elements: usize, agreed: impl IntoIterator<Item = usize>) -> Self {
        let (elements, digest) = (elements as u64, hash_arguments(agreed));
        CollectiveCall { kind, number: 0, elements, digest, element_bytes: size_of::<f32>() }
    }

    /// Includes the element size `bytes` in this summary of a call, so that calls with different
    /// element sizes do not match.
    fn with_element_size(self, bytes: usize) -> Self {
        let digest = hash_arguments([self.digest as usize, bytes]);
        CollectiveCall { digest, element_bytes: bytes, ..self }
    }

    /// Returns a copy of this summary with the call number `number`, which counts the collectives
    /// that the rank called in its group before this call.
    pub(crate) fn with_call_number(self, number: u64) -> Self {
        CollectiveCall { number, ..self }
    }

    /// Summarizes this rank's call of all-gather, so that ranks can detect that they made different
    /// calls. Fails, with the name of the argument, if a buffer's length or element size does not
    /// fit `counts` and the other buffer.
    pub(crate) fn summarize_all_gather(
        position: GroupPosition,
        recv: BufferShape,
        send: BufferShape,
        counts: &[usize],
    ) -> Result<Self> {
        let kind = CollectiveKind::AllGather;
        check_equal_element_sizes(kind, recv, send)?;
        let total = sum_counts(kind, "counts", counts, position.world)?;
        check_buffer_len(kind, "send", send.len, "counts[rank]", counts[position.rank])?;
        check_buffer_len(kind, "recv", recv.len, "the sum of counts", total)?;
        let call = CollectiveCall::new(kind, total, counts.iter().copied());
        Ok(call.with_element_size(recv.element_bytes))
    }

    /// Summarizes this rank's call of the ordered reduce-scatter (in which receivers sum the
    /// vectors), so that ranks can detect that they made different calls. Fails if the length of
    /// one of the vectors is not the sum of `counts`, or if their number is not this rank's element
    /// of `partial_counts`.
    pub(crate) fn summarize_reduce_scatter_ordered(
        position: GroupPosition,
        partial_lens: impl Iterator<Item = usize>,
        partial_counts: &[usize],
        counts: &[usize],
    ) -> Result<Self> {
        let kind = CollectiveKind::ReduceScatterOrdered;
        let total = sum_counts(kind, "counts", counts, position.world)?;
        sum_counts(kind, "partial_counts", partial_counts, position.world)?;
        let mut partials = 0;
        for len in partial_lens {
            check_buffer_len(kind, "a partial", len, "the sum of counts", total)?;
            partials += 1;
        }
        let expected = partial_counts[position.rank];
        check_buffer_len(kind, "the list of partials", partials, "partial_counts[rank]", expected)?;
        Ok(CollectiveCall::new(kind, total, counts.iter().chain(partial_counts).copied()))
    }

    /// Summarizes this rank's call of reduce-scatter, so that ranks can detect that they made
    /// different calls. Fails if a buffer's length does not fit `counts`.
    pub(crate) fn summarize_reduce_scatter(
        position: GroupPosition,
        recv_len: usize,
        send_len: usize,
        counts: &[usize],
    ) -> Result<Self> {
        let kind = CollectiveKind::ReduceScatter;
        let total = sum_counts(kind, "counts", counts, position.world)?;
        check_buffer_len(kind, "recv", recv_len, "counts[rank]", counts[position.rank])?;
        check_buffer_len(kind, "send", send_len, "the sum of counts", total)?;
        Ok(CollectiveCall::new(kind, total, counts.iter().copied()))
    }

    /// Summarizes this rank's call of all-reduce on `len` elements, so that ranks can detect that
    /// they made different calls.
    pub(crate) fn summarize_all_reduce(len: usize) -> Self {
        CollectiveCall::new(CollectiveKind::AllReduce, len, [])
    }

    /// Summarizes this rank's call of broadcast of `len` elements from rank `root`, so that ranks
    /// can detect that they made different calls. Fails if the group has no rank `root`.
    pub(crate) fn summarize_broadcast(position: GroupPosition, len: usize, root: usize) -> Result<Self> {
        let (collective, world) = (CollectiveKind::Broadcast, position.world);
        if root >= world {
            return Err(ArgumentError::RootOutOfRange { collective, root, world });
        }
        Ok(CollectiveCall::new(collective, len, [root]))
    }

    /// Summarizes this rank's call of all-to-all, so that ranks can detect that they made different
    /// calls. Fails, with the name of the argument, if a buffer does not fit its counts or if this
    /// rank's counts for itself differ.
    pub(crate) fn summarize_all_to_all(
        position: GroupPosition,
        recv: BufferShape,
        recv_counts: &[usize],
        send: BufferShape,
        send_counts: &[usize],
    ) -> Result<Self> {
        let kind = CollectiveKind::AllToAll;
        check_equal_element_sizes(kind, recv, send)?;
        let recv_total = sum_counts(kind, "recv_counts", recv_counts, position.world)?;
        check_buffer_len(kind, "recv", recv.len, "the sum of recv_counts", recv_total)?;
        let send_total = sum_counts(kind, "send_counts", send_counts, position.world)?;
        check_buffer_len(kind, "send", send.len, "the sum of send_counts", send_total)?;
        let (sent, expected) = (send_counts[position.rank] as u64, recv_counts[position.rank] as u64);
        if sent != expected {
            return Err(ArgumentError::SelfTransfer { collective: kind, sent, expected });
        }
        Ok(CollectiveCall::new(kind, 0, []).with_element_size(recv.element_bytes))
    }

    /// Summarizes this rank's call of all-gather with `len` bytes, so that ranks can detect that
    /// they made different calls. Fails if `len` exceeds [`crate::MAX_GATHER_BYTES`].
    pub(crate) fn summarize_all_gather_bytes(len: usize) -> Result<Self> {
        let (collective, limit) = (CollectiveKind::AllGatherBytes, crate::MAX_GATHER_BYTES);
        if len > limit {
            return Err(ArgumentError::TooManyBytes { collective, bytes: len, limit });
        }
        Ok(CollectiveCall::new(collective, 0, []))
    }

    /// Summarizes this rank's call that allocates a shared window (memory of all ranks), so that
    /// ranks can detect that they made different calls. Fails if `counts` does not have one entry
    /// per rank or if the sum overflows.
    pub(crate) fn summarize_shared_window(
        position: GroupPosition,
        counts: &[usize],
        element_bytes: usize,
    ) -> Result<Self> {
        let kind = CollectiveKind::SharedWindow;
        let total = sum_counts(kind, "counts", counts, position.world)?;
        Ok(CollectiveCall::new(kind, total, counts.iter().copied()).with_element_size(element_bytes))
    }

    /// Summarizes this rank's call of barrier, which has no arguments, so that ranks can detect
    /// that they made different calls.
    pub(crate) fn summarize_barrier() -> Self {
        CollectiveCall::new(CollectiveKind::Barrier, 0, [])
    }

    /// Encodes this summary of a call in three 64-bit words, which ranks exchange to compare their
    /// calls. The kind of the collective is the low byte of the first word.
    pub(crate) fn to_words(self) -> [u64; 3] {
        [self.number << 8 | self.kind as u64, self.elements, self.digest]
    }

    /// Compares this summary of a collective call of `rank` with `peer_words`, the summary that
    /// `peer` sent, and fails if the two calls differ.
    pub(crate) fn check_peer_call(
        &self,
        rank: usize,
        peer: usize,
        peer_words: [u64; 3],
    ) -> std::result::Result<(), CallMismatch> {
        let words = self.to_words();
        if words == peer_words {
            return Ok(());
        }
        let (call, peer_call) = (decode_call_summary(words), decode_call_summary(peer_words));
        Err(CallMismatch::Call { rank, call, peer, peer_call })
    }

    /// Fails if rank `to` expects another number of bytes (`expected`) than rank `from` sends to it
    /// in this collective (`sent`). The error states numbers of elements if these differ, and
    /// numbers of bytes otherwise.
    pub(crate) fn check_transfer_bytes(
        &self,
        from: usize,
        to: usize,
        sent: u64,
        expected: u64,
    ) -> std::result::Result<(), CallMismatch> {
        let size = self.element_bytes as u64;
        if size > 1 {
            check_transfer_elements(from, to, sent / size, expected / size)?;
        }
        if sent == expected {
            return Ok(());
        }
        Err(CallMismatch::Transfer { from, to, sent, expected, unit: TransferUnit::Bytes })
    }
}

/// Decodes, for an error message, the three words in which a peer described a call: the collective,
/// the call number and the number of elements. Invalid words of a faulty peer also give a summary,
/// so decoding never fails.
fn decode_call_summary(words: [u64; 3]) -> CallSummary {
    let kind_number = words[0] & 0xff;
    let collective = CollectiveKind::ALL.into_iter().find(|kind| *kind as u64 == kind_number);
    CallSummary { collective, call_number: words[0] >> 8, elements: words[1] }
}

/// Fails if `sent`, the number of elements that rank `from` sends to rank `to`, differs from
/// `expected`, the number of elements that rank `to` expects.
pub(crate) fn check_transfer_elements(
    from: usize,
    to: usize,
    sent: u64,
    expected: u64,
) -> std::result::Result<(), CallMismatch> {
    if sent == expected {
        return Ok(());
    }
    Err(CallMismatch::Transfer { from, to, sent, expected, unit: TransferUnit::Elements })
}

/// Returns the start index of each rank's part of a vector, where the parts are stored in rank
/// order and the part of rank r has `counts[r]` elements.
pub(crate) fn compute_part_offsets(counts: &[usize]) -> Vec<usize> {
    counts
        .iter()
        .scan(0, |end, &n| {
            let start = *end;
            *end += n;
            Some(start)
        })
        .collect()
}

/// Returns one index range for each length in `lens`, where the first range starts at 0 and each
/// other range starts at the end of the previous one.
pub(crate) fn compute_consecutive_ranges(lens: &[usize]) -> Vec<Range<usize>> {
    compute_part_offsets(lens).into_iter().zip(lens).map(|(start, n)| start..start + n).collect()
}

/// Computes the range of elements that `rank` gets if `len` elements are divided among `world`
/// ranks as evenly as possible.
pub(crate) fn compute_even_share(len: usize, rank: usize, world: usize) -> Range<usize> {
    let (quotient, remainder) = (len / world, len % world);
    let start = quotient * rank + remainder.min(rank);
    start..start + quotient + usize::from(rank < remainder)
}

/// Returns the sum of `counts`, the number of elements in each rank's part of a collective's
/// buffer. `name` is the list's name in errors. Fails if the list does not have `world` entries or
/// if the sum does not fit the address space.
fn sum_counts(
    collective: CollectiveKind,
    name: &'static str,
    counts: &[usize],
    world: usize,
) -> Result<usize> {
    if counts.len() != world {
        return Err(ArgumentError::CountsLength { collective, counts: name, len: counts.len(), world });
    }
    counts
        .iter()
        .try_fold(0usize, |sum, &n| sum.checked_add(n))
        .filter(|&sum| sum <= isize::MAX as usize / size_of::<f32>())
        .ok_or(ArgumentError::CountsOverflow { collective, counts: name })
}

/// Fails if the length `len` of a buffer of a collective differs from `expected`, the length that
/// the collective's other arguments require. The error uses the name `buffer`, and `required` as
/// the formula of the expected length, such as `counts[rank]`.
fn check_buffer_len(
    collective: CollectiveKind,
    buffer: &'static str,
    len: usize,
    required: &'static str,
    expected: usize,
) -> Result<()> {
    if len == expected {
        return Ok(());
    }
    Err(ArgumentError::BufferLength { collective, buffer, len, required, expected })
}

/// Fails if the elements of the buffers `recv` and `send` have different sizes in bytes.
fn check_equal_element_sizes(collective: CollectiveKind, recv: BufferShape, send: BufferShape) -> Result<()> {
    let (send_bytes, recv_bytes) = (send.element_bytes, recv.element_bytes);
    if send_bytes == recv_bytes {
        return Ok(());
    }
    Err(ArgumentError::ElementSize { collective, send_bytes, recv_bytes })
}

/// Computes a 64-bit hash of those arguments of a collective that must be equal on all ranks, such
/// as counts and the root. Uses a multiply-xor hash and the finalizer of splitmix64. Lists with
/// different contents have different hashes with near certainty.
fn hash_arguments(list: impl IntoIterator<Item = usize>) -> u64 {
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

    const POSITION: GroupPosition = GroupPosition { rank: 1, world: 3 };

    fn describe_f32_buffer(len: usize) -> BufferShape {
        BufferShape { len, element_bytes: 4 }
    }

    #[test]
    fn a_wrong_argument_is_named_with_its_numbers() {
        let halves = BufferShape { len: 6, element_bytes: 2 };
        let errors = [
            CollectiveCall::summarize_all_gather(
                POSITION,
                describe_f32_buffer(6),
                describe_f32_buffer(2),
                &[1, 3, 2],
            ),
            CollectiveCall::summarize_all_gather(
                POSITION,
                describe_f32_buffer(7),
                describe_f32_buffer(3),
                &[1, 3, 2],
            ),
            CollectiveCall::summarize_all_gather(POSITION, halves, describe_f32_buffer(3), &[1, 3, 2]),
            CollectiveCall::summarize_reduce_scatter(POSITION, 3, 6, &[1, 3]),
            CollectiveCall::summarize_reduce_scatter_ordered(
                POSITION,
                [6, 5].into_iter(),
                &[1, 2, 0],
                &[1, 3, 2],
            ),
            CollectiveCall::summarize_all_gather(
                POSITION,
                describe_f32_buffer(0),
                describe_f32_buffer(0),
                &[usize::MAX, 1, 1],
            ),
            CollectiveCall::summarize_broadcast(POSITION, 1, 3),
            CollectiveCall::summarize_all_to_all(
                POSITION,
                describe_f32_buffer(3),
                &[1, 1, 1],
                describe_f32_buffer(4),
                &[1, 2, 1],
            ),
            CollectiveCall::summarize_all_gather_bytes(crate::MAX_GATHER_BYTES + 1),
        ];
        insta::assert_snapshot!(errors.map(|e| e.unwrap_err().to_string()).join("\n"));
    }

    #[test]
    fn a_mismatch_names_both_calls() {
        let ours = CollectiveCall::summarize_all_reduce(5).with_call_number(17);
        assert_eq!(ours.check_peer_call(0, 2, ours.to_words()), Ok(()));
        let barrier = CollectiveCall::summarize_barrier().with_call_number(17);
        let gather = |counts| {
            CollectiveCall::summarize_all_gather(
                POSITION,
                describe_f32_buffer(6),
                describe_f32_buffer(3),
                counts,
            )
            .unwrap()
        };
        let (one, other) = (gather(&[1, 3, 2]), gather(&[2, 3, 1]));
        let errors = [
            ours.check_peer_call(0, 2, barrier.to_words()),
            one.check_peer_call(1, 0, other.to_words()),
            one.check_peer_call(1, 0, [u64::MAX; 3]),
        ];
        insta::assert_snapshot!(errors.map(|e| e.unwrap_err().to_string()).join("\n"));
    }

    #[test]
    fn even_shares_cover_every_element_once() {
        for world in 1..=9 {
            for len in 0..40 {
                let mut end = 0;
                for rank in 0..world {
                    let share = compute_even_share(len, rank, world);
                    assert_eq!(share.start, end);
                    end = share.end;
                }
                assert_eq!(end, len);
            }
        }
    }
}
