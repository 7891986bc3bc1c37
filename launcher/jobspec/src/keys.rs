//! The types by which the keys of job.yaml are declared, read, printed and documented. The
//! declaration of a key determines how its value is decoded, printed, checked and documented, and
//! its part of the JSON Schema.
pub(crate) mod choice;
pub(crate) mod collections;
pub(crate) mod decoder;
pub(crate) mod job_values;
pub(crate) mod key;
pub(crate) mod key_info;
pub(crate) mod nearest_name;
pub(crate) mod numbers;
pub(crate) mod record;
pub(crate) mod schema;
pub(crate) mod section;
pub(crate) mod text;
pub(crate) mod units;
pub(crate) mod value_type;
