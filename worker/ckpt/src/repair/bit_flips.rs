//! Repairs a single flipped bit in a member of a torch file: its CRC-32 identifies the bit.
use super::RepairDir;
use crate::disk::Directory;
use crate::error::{CkptError, Result};
use crate::formats::zip::{self, Member};
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;

/// The polynomial of CRC-32 (IEEE 802.3), lowest bit first.
const POLYNOMIAL: u32 = 0xEDB8_8320;
/// Longest member that is searched for a flipped bit. Damage of many bits looks like a single
/// flipped bit with probability 8 × length / 2³²: one in a thousand for this length.
const MEMBER_MAX: u64 = 512 << 10;

/// The bit whose flip explains the XOR of two CRC-32 of a message of `len` bytes, as byte index and
/// mask.
pub(super) fn find_flipped_bit(difference: u32, len: u64) -> Option<(u64, u8)> {
    let mut reg = POLYNOMIAL;
    for back in 0..len.checked_mul(8)? {
        if reg == difference {
            let bit = len * 8 - 1 - back;
            return Some((bit / 8, 1 << (bit % 8)));
        }
        reg = (reg >> 1) ^ (POLYNOMIAL * (reg & 1));
    }
    None
}

/// Flips back single flipped bits in the members of a torch file of the copy.
pub(super) fn repair_file(bench: &mut RepairDir, name: &str) -> Result<()> {
    let directory = Directory::open(&bench.dir)?;
    let (file, size) = directory.open_file(name, nix::fcntl::OFlag::empty())?;
    let Ok(members) = zip::members(size, |at, out| file.read_exact_at(out, at)) else { return Ok(()) };
    let mut found = Vec::new();
    for member in &members {
        let (Some(crc), len) = (member.crc, member.data.end - member.data.start) else { continue };
        if len > MEMBER_MAX {
            continue;
        }
        let mut bytes = vec![0u8; len as usize];
        file.read_exact_at(&mut bytes, member.data.start)
            .map_err(CkptError::io("read", &bench.dir.join(name)))?;
        let actual = crc32fast::hash(&bytes);
        if actual != crc
            && let Some((at, mask)) = find_flipped_bit(actual ^ crc, len)
        {
            bytes[at as usize] ^= mask;
            // verify the result instead of relying on the arithmetic
            if crc32fast::hash(&bytes) == crc {
                found.push((member, at, mask, bytes[at as usize]));
            }
        }
    }
    if found.is_empty() {
        return Ok(());
    }
    bench.copy_original(name)?;
    let path = bench.dir.join(name);
    let copy = OpenOptions::new().write(true).open(&path).map_err(CkptError::io("open", &path))?;
    for (member, at, mask, byte) in found {
        copy.write_all_at(&[byte], member.data.start + at).map_err(CkptError::io("write", &path))?;
        bench.rebuilt.push(describe_flip(name, member, at, mask));
    }
    Ok(())
}

fn describe_flip(name: &str, member: &Member, at: u64, mask: u8) -> String {
    let len = member.data.end - member.data.start;
    let chance = 8.0 * len as f64 / (1u64 << 32) as f64 * 1e6;
    format!(
        "{name}: flipped bit {} of byte {at} of {} back; its CRC-32 matches again (probability that other damage looks \
         like this: {chance:.0} in a million)",
        mask.trailing_zeros(),
        member.name
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_flipped_bit_is_found(bytes in proptest::collection::vec(any::<u8>(), 1..3000), at in any::<usize>(), bit in 0u8..8) {
            let at = at % bytes.len();
            let mut bad = bytes.clone();
            bad[at] ^= 1 << bit;
            let difference = crc32fast::hash(&bad) ^ crc32fast::hash(&bytes);
            prop_assert_eq!(find_flipped_bit(difference, bytes.len() as u64), Some((at as u64, 1 << bit)));
        }
    }

    #[test]
    fn two_flipped_bits_are_not_mistaken_for_one() {
        let bytes = vec![7u8; 4000];
        for (a, b) in [(0, 8), (5, 31_999), (100, 101), (16_000, 16_033)] {
            let mut bad = bytes.clone();
            bad[a / 8] ^= 1 << (a % 8);
            bad[b / 8] ^= 1 << (b % 8);
            assert_eq!(
                find_flipped_bit(crc32fast::hash(&bad) ^ crc32fast::hash(&bytes), 4000),
                None,
                "{a} {b}"
            );
        }
        assert_eq!(find_flipped_bit(1, 0), None);
    }
}
