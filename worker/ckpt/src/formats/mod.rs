//! File formats that tensors rest in.
pub(crate) mod dcp;
pub(crate) mod deepspeed;
pub(crate) mod experts;
pub(crate) mod legacy;
mod numbered;
pub(crate) mod optimizer;
pub(crate) mod order;
pub mod safetensors;
pub(crate) mod torch_file;
pub(crate) mod torch_write;
pub(crate) mod weights;
pub(crate) mod zip;

/// What a file that is no file of weights is, where its beginning tells, else `why`.
pub(crate) fn or_stand_in(
    size: u64,
    read_at: &mut impl FnMut(u64, &mut [u8]) -> std::io::Result<()>,
    why: String,
) -> String {
    let mut beginning = [0u8; 23];
    let is_read = size >= beginning.len() as u64 && read_at(0, &mut beginning).is_ok();
    let begins = |with: &str| is_read && beginning[..with.len()].eq_ignore_ascii_case(with.as_bytes());
    match () {
        () if begins("version https://git-lfs") => {
            "it is a pointer of Git LFS, not the file itself: fetch that with `git lfs pull`".into()
        }
        () if begins("<!doctype") || begins("<html") => {
            "it is a web page, not the file itself: download the file again".into()
        }
        () => why,
    }
}
