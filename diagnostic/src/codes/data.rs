//! Codes of errors about training data and tokenizers.

codes! {
    DATA_FILE_UNREADABLE: Job = "data-file-unreadable" {
        summary: "A data file could not be read.",
        cause: "The file was removed, its permissions forbid reading, or the storage failed.",
        remedy: "Check the path and its permissions on every host.",
    }
}
