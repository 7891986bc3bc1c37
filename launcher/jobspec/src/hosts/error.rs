//! Errors in host names, host lists, hostfiles and filters of hosts.
use super::limits::{
    MAX_BRACKET_PAIRS, MAX_HOSTS, MAX_NAME_BYTES, MAX_RANGE_DIGITS, MAX_SLOT_NUMBER, MAX_SLOTS_PER_HOST,
};
use diagnostic::{Code, codes};
use thiserror::Error;

/// A mistake in a host name or a list of hosts, with its position.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{problem}")]
pub struct HostSyntaxError {
    /// The byte offset of the mistake in the text.
    pub at: usize,
    /// The mistake, whose text is also the text of the whole error.
    pub problem: HostSyntaxProblem,
}

/// The kinds of mistakes in a host name or a list of hosts. Each error text is a predicate, such as
/// "names no host". The caller puts the name of the key or option in front.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum HostSyntaxProblem {
    /// No login name precedes the `@`.
    #[error("has no user before the `@`")]
    UserEmpty,
    /// The login name is longer than [`MAX_NAME_BYTES`].
    #[error("has a user of more than {MAX_NAME_BYTES} bytes")]
    UserTooLong,
    /// The login name contains characters that ssh or a shell could misinterpret.
    #[error("has a user with characters other than letters, digits, `.`, `_`, `-`")]
    UserInvalid,
    /// The text has no host name where one is expected.
    #[error("names no host")]
    NameEmpty,
    /// A host name is longer than [`MAX_NAME_BYTES`].
    #[error("has a name of more than {MAX_NAME_BYTES} bytes")]
    NameTooLong,
    /// A name contains a character that is not allowed in host names. The variant contains the
    /// character.
    #[error("has `{}` in the name of a host", .0.escape_default())]
    NameCharacter(char),
    /// A host name begins with `-`, `.` or `%`.
    #[error("begins with something other than a letter or digit")]
    NameStart,
    /// The text has several colons and is not an IPv6 address.
    #[error("is neither `name:port` nor an IPv6 address")]
    AddressInvalid,
    /// Text other than a port follows an address in brackets.
    #[error("has something other than `:PORT` after the address")]
    TextAfterAddress,
    /// The port is not a number from 1 to 65535.
    #[error("needs a port from 1 to 65535 after the colon")]
    PortInvalid,
    /// An opening bracket is within brackets.
    #[error("has a `[` inside brackets")]
    BracketNested,
    /// A closing bracket has no opening bracket.
    #[error("has a `]` without a `[`")]
    BracketUnopened,
    /// An opening bracket has no closing bracket.
    #[error("has a `[` that is never closed")]
    BracketUnclosed,
    /// A name has more pairs of brackets than are supported.
    #[error("has more than {} pairs of brackets", MAX_BRACKET_PAIRS)]
    TooManyBrackets,
    /// A range contains text that is not a number, or a number with too many digits.
    #[error("needs numbers of at most {} digits between brackets, as in [01-16,20]", MAX_RANGE_DIGITS)]
    RangeNumberInvalid,
    /// The last number of a range is less than its first number. The variant contains the range.
    #[error("has a range that ends before it begins: {0}")]
    RangeReversed(String),
    /// The text stands for more than [`MAX_HOSTS`] hosts.
    #[error("names more than {MAX_HOSTS} hosts")]
    TooManyHosts,
}

impl HostSyntaxError {
    /// Returns the diagnostic code with which this mistake is reported to the user.
    pub fn code(&self) -> Code {
        use HostSyntaxProblem::*;
        match self.problem {
            UserEmpty | UserTooLong | UserInvalid | NameEmpty | NameTooLong | NameCharacter(_)
            | NameStart | AddressInvalid | TextAfterAddress | PortInvalid => codes::job::JOB_HOST_INVALID,
            BracketNested | BracketUnopened | BracketUnclosed | TooManyBrackets | RangeNumberInvalid
            | RangeReversed(_) | TooManyHosts => codes::job::JOB_HOST_RANGE_INVALID,
        }
    }

    /// Moves the position of the error by `by` bytes, from a position in one item to a position in
    /// the whole list of hosts.
    pub(super) fn shift_by(self, by: usize) -> Self {
        HostSyntaxError { at: self.at + by, ..self }
    }
}

/// A mistake in a line of a hostfile, with the number of the line and the position in it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{problem}")]
pub struct HostfileError {
    /// The number of the line with the mistake, counted from 1.
    pub line: u32,
    /// The column of the mistake in characters, counted from 1.
    pub column: u32,
    /// The mistake, whose text is also the text of the whole error.
    pub problem: HostfileProblem,
}

impl HostfileError {
    /// Returns the diagnostic code with which this mistake is reported to the user.
    pub fn code(&self) -> Code {
        codes::job::HOSTFILE_INVALID
    }
}

/// The kinds of mistakes in a hostfile.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum HostfileProblem {
    /// No line of the hostfile names a host.
    #[error("the hostfile names no host")]
    NoHost,
    /// The first word of the line is not a valid host.
    #[error("the host {0}")]
    HostInvalid(HostSyntaxProblem),
    /// A line gives the login name twice: before the `@` of the host, and as an option.
    #[error("the user is given twice")]
    UserTwice,
    /// The file has more than [`MAX_HOSTS`] hosts.
    #[error("the hostfile names more than {MAX_HOSTS} hosts")]
    TooManyHosts,
    /// Several lines name a host, and at least one of them states the number of slots.
    #[error("the slots of {host} are given twice; the host is already on line {line}")]
    SlotsTwice {
        /// The host's name.
        host: String,
        /// The number of the first line that names the host.
        line: u32,
    },
    /// Several lines name a host, with different login names.
    #[error("{host} has another user on line {line}")]
    UserDiffers {
        /// The host's name.
        host: String,
        /// The number of the first line that names the host.
        line: u32,
    },
    /// Too many lines name a host without stating its slots. Each such line stands for one slot,
    /// and the number of slots is limited. The variant contains the host's name.
    #[error("{0} has more than {MAX_SLOTS_PER_HOST} slots")]
    TooManySlots(String),
    /// An option has no `=`. The variant contains the option.
    #[error("`{0}` is not KEY=VALUE, as in `slots=8`")]
    OptionInvalid(String),
    /// An option has an unknown name, which the variant contains.
    #[error("unknown option `{0}`; the options of a host are slots, max-slots and user")]
    OptionUnknown(String),
    /// A line repeats an option, whose name the variant contains.
    #[error("`{0}` is given twice")]
    OptionTwice(String),
    /// The number of slots is 0, too large or not a number. The variant contains the text.
    #[error("slots must be a number from 1 to {MAX_SLOTS_PER_HOST}, found `{0}`")]
    SlotsInvalid(String),
    /// `slots` is larger than `max-slots`.
    #[error("slots ({slots}) is more than max-slots ({max})")]
    SlotsOverMaximum {
        /// The value of `slots`.
        slots: u32,
        /// The value of `max-slots`.
        max: u32,
    },
}

/// A mistake in a filter of hosts (`cluster.include` or `cluster.exclude`).
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{problem}")]
pub struct FilterError {
    /// Whether the mistake is in `cluster.exclude`; otherwise it is in `cluster.include`.
    pub exclude: bool,
    /// The index of the filter in the list of filters; `None` if the mistake concerns the whole
    /// list.
    pub item: Option<usize>,
    /// The mistake, whose text is a predicate. The caller prepends the name of the key.
    pub problem: FilterProblem,
}

impl FilterError {
    /// Returns the diagnostic code with which this mistake is reported to the user.
    pub fn code(&self) -> Code {
        match self.problem {
            FilterProblem::IncludeAndExclude => codes::job::JOB_KEYS_CONFLICT,
            _ => codes::job::JOB_HOST_FILTER_INVALID,
        }
    }
}

/// The kinds of mistakes in a filter of hosts (`cluster.include` or `cluster.exclude`).
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum FilterProblem {
    /// `cluster.include` and `cluster.exclude` are both given.
    #[error("and `cluster.include` are both given")]
    IncludeAndExclude,
    /// No host remains after the filters are applied.
    #[error("leaves no host")]
    NothingLeft,
    /// The filter excludes slots of a host, but the number of slots of the host is unknown. The
    /// variant contains the host's name.
    #[error("excludes slots of {0}, whose number of slots is unknown; write `{0} slots=N` in a hostfile")]
    SlotCountUnknown(String),
    /// The filter names a host that the job does not have. The variant contains this name.
    #[error("names the host `{}`, which the job does not have", .0.escape_debug())]
    HostUnknown(String),
    /// A host name in the filter is empty.
    #[error("has an empty host name; hosts are separated by a single `@`")]
    HostEmpty,
    /// The ranges in a host name are not valid.
    #[error("{0}")]
    HostInvalid(HostSyntaxProblem),
    /// The filter names a slot that the host does not have.
    #[error("names slot {slot} of {host}, which has {slots} slots")]
    SlotMissing {
        /// The number of the slot.
        slot: u32,
        /// The host's name.
        host: String,
        /// The number of slots that the host has.
        slots: usize,
    },
    /// The filters name a host both with and without slots. The variant contains the host's name.
    #[error("names {0} once with slots and once without")]
    SlotsAmbiguous(String),
    /// A list of slots in the filter contains text that is not a number, or a number that is too
    /// large. The variant contains the list.
    #[error("has the slots `{}`; slots are numbers from 0 to {MAX_SLOT_NUMBER}, as in `node-1:0,2`", .0.escape_debug())]
    SlotsInvalid(String),
    /// A list of slots in the filter is too long, because it repeats slots.
    #[error("names too many slots of one host")]
    TooManySlots,
}
