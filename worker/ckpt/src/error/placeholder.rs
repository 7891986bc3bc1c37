//! [`PlaceholderFile`]: a small file that a failed download or checkout (such as of Git LFS) left
//! in place of the real file.

/// A small file that a failed download or checkout left in place of the real file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlaceholderFile {
    /// A pointer of Git LFS, which names the real file by its hash.
    #[error("the file is a Git LFS pointer, not the file itself; `git lfs pull` downloads it")]
    GitLfsPointer,
    /// A web page, such as a login page that was downloaded.
    #[error("the file is a web page, not the file itself; download it again")]
    HtmlPage,
}
