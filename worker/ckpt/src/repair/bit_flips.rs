//! Repairs single flipped bits in torch files. The CRC-32 of a zip member identifies the flipped
//! bit.
use super::repair_dir::RepairDir;
use crate::codec::disk::Directory;
use crate::codec::zip::{self, ZipMember};
use crate::error::{CkptError, Result};
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;

/// The polynomial of CRC-32 (IEEE 802.3), lowest bit first.
const CRC32_POLYNOMIAL: u32 = 0xEDB8_8320;
/// Maximum size in bytes of a zip member that is searched for a flipped bit. Damage of many bits
/// looks like a single flipped bit with a probability of 8 × size / 2³², one in a thousand for this
/// size.
const MEMBER_BYTES_MAX: u64 = 512 << 10;

/// Finds the one bit of `len` bytes of damaged data whose flip changed the CRC-32 of the data by
/// `difference`. `difference` is the XOR of the CRC-32s before and after the flip. Returns the
/// index of the byte and the mask of the bit. Returns `None` if no single bit explains the
/// difference.
pub(super) fn find_flipped_bit(difference: u32, len: u64) -> Option<(u64, u8)> {
    let mut reg = CRC32_POLYNOMIAL;
    for back in 0..len.checked_mul(8)? {
        if reg == difference {
            let bit = len * 8 - 1 - back;
            return Some((bit / 8, 1 << (bit % 8)));
        }
        reg = (reg >> 1) ^ (CRC32_POLYNOMIAL * (reg & 1));
    }
    None
}

/// Repairs one flipped bit in each zip member of the torch file `name` whose content does not match
/// its CRC-32. Skips members larger than [`MEMBER_BYTES_MAX`], and leaves other damage unchanged.
pub(super) fn revert_bit_flips(repair_dir: &mut RepairDir, name: &str) -> Result<()> {
    let directory = Directory::open(&repair_dir.dir)?;
    let (file, size) = directory.open_file(name, nix::fcntl::OFlag::empty())?;
    let Ok(members) = zip::read_members(size, |at, out| file.read_exact_at(out, at)) else { return Ok(()) };
    let mut found = Vec::new();
    for member in &members {
        let (Some(crc), len) = (member.crc, member.size()) else { continue };
        if len > MEMBER_BYTES_MAX {
            continue;
        }
        let mut bytes = vec![0u8; len as usize];
        file.read_exact_at(&mut bytes, member.data.start)
            .map_err(CkptError::io("read", &repair_dir.dir.join(name)))?;
        let actual = crc32fast::hash(&bytes);
        if actual != crc
            && let Some((at, mask)) = find_flipped_bit(actual ^ crc, len)
        {
            bytes[at as usize] ^= mask;
            // check the result with the CRC instead of relying on the arithmetic
            if crc32fast::hash(&bytes) == crc {
                found.push((member, at, mask, bytes[at as usize]));
            }
        }
    }
    if found.is_empty() {
        return Ok(());
    }
    repair_dir.replace_link_by_copy(name)?;
    repair_dir.restored.insert(name.to_owned());
    let path = repair_dir.dir.join(name);
    let copy = OpenOptions::new().write(true).open(&path).map_err(CkptError::io("open", &path))?;
    for (member, at, mask, byte) in found {
        copy.write_all_at(&[byte], member.data.start + at).map_err(CkptError::io("write", &path))?;
        repair_dir.rebuilt.push(describe_reverted_flip(name, member, at, mask));
    }
    Ok(())
}

/// Formats the message that a flipped bit in a torch file was repaired, with the probability that
/// the repair hides other damage. `at` is the index of the byte in the member.
fn describe_reverted_flip(name: &str, member: &ZipMember, at: u64, mask: u8) -> String {
    let chance = 8.0 * member.size() as f64 / (1u64 << 32) as f64 * 1e6;
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
