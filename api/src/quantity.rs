//! Kubernetes quantities, exact.
//!
//! `k8s-openapi` carries a quantity as the text that was sent. Decisions need
//! its value, and comparing what was sent with what a server stored needs the
//! one canonical spelling. A float would lose both.

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;
use serde::{Deserialize, Serialize};

const NANO: i128 = 1_000_000_000;
/// Longer texts are refused unread: a quantity comes from users.
const MAX_LENGTH: usize = 256;
/// Exponents beyond this lie outside every value that can be held.
const MAX_EXPONENT: i32 = 64;

/// An exact amount with the family of suffixes it is printed in.
///
/// The resolution is 10⁻⁹, as in Kubernetes; finer amounts are rounded away
/// from zero when read. Two quantities are equal if their values are.
#[derive(Debug, Clone, Copy)]
pub struct Quantity {
    nanos: i128,
    family: Family,
}

/// The three ways to write a quantity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// `n u m k M G T P E`.
    DecimalSi,
    /// `Ki Mi Gi Ti Pi Ei`.
    BinarySi,
    /// `e3`.
    DecimalExponent,
}

/// Why a text is not a quantity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// It has no number, or something that is neither number nor suffix.
    #[error("`{0}` is not a quantity such as `15Gi`, `500m` or `1e3`")]
    Malformed(String),
    /// It is larger than can be held (about 10²⁹).
    #[error("the quantity `{0}` is out of range")]
    OutOfRange(String),
}

impl Quantity {
    /// Nothing.
    pub const ZERO: Self = Self { nanos: 0, family: Family::DecimalSi };

    /// A number of things: `16`.
    pub fn count(value: u64) -> Self {
        Self { nanos: i128::from(value) * NANO, family: Family::DecimalSi }
    }

    /// An amount of memory: `80Gi`.
    pub fn bytes(value: u64) -> Self {
        Self { nanos: i128::from(value) * NANO, family: Family::BinarySi }
    }

    /// The value in units of 10⁻⁹.
    pub fn nanos(self) -> i128 {
        self.nanos
    }

    /// The family it is printed in.
    pub fn family(self) -> Family {
        self.family
    }

    /// The value in whole units, rounded up; absent where it is negative or
    /// larger than the type.
    pub fn units(self) -> Option<u64> {
        u64::try_from(self.nanos.div_euclid(NANO) + i128::from(self.nanos.rem_euclid(NANO) != 0)).ok()
    }

    /// The sum, in the family of `self` (of `other` where `self` is zero).
    #[must_use]
    pub fn checked_add(self, other: Self) -> Option<Self> {
        let nanos = self.nanos.checked_add(other.nanos)?;
        Some(Self { nanos, family: self.family_with(other) })
    }

    /// The difference, in the family of `self` (of `other` where `self` is
    /// zero). It may be negative.
    #[must_use]
    pub fn checked_sub(self, other: Self) -> Option<Self> {
        let nanos = self.nanos.checked_sub(other.nanos)?;
        Some(Self { nanos, family: self.family_with(other) })
    }

    /// The product with a whole number.
    #[must_use]
    pub fn checked_mul(self, factor: u64) -> Option<Self> {
        Some(Self { nanos: self.nanos.checked_mul(i128::from(factor))?, ..self })
    }

    fn family_with(self, other: Self) -> Family {
        if self.nanos == 0 { other.family } else { self.family }
    }
}

impl FromStr for Quantity {
    type Err = QuantityError;

    /// Reads what the API server reads, except that a text without any digit
    /// (`+`, `Ki`), which the API server takes for zero, is refused.
    fn from_str(text: &str) -> Result<Self, QuantityError> {
        let quoted = || text.chars().take(80).collect::<String>();
        let malformed = || QuantityError::Malformed(quoted());
        if text.len() > MAX_LENGTH {
            return Err(malformed());
        }
        let (negative, unsigned) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text.strip_prefix('+').unwrap_or(text)),
        };
        let (integer, rest) = split_digits(unsigned);
        let (fraction, suffix) = match rest.strip_prefix('.') {
            Some(rest) => split_digits(rest),
            None => ("", rest),
        };
        if integer.is_empty() && fraction.is_empty() {
            return Err(malformed());
        }
        let scale = Scale::from_suffix(suffix).ok_or_else(malformed)?;
        let magnitude = match (scale.magnitude(integer, fraction), scale) {
            // As the API server does, and only for this family.
            (magnitude, Scale::Binary(_)) => {
                magnitude.map_or(i128::from(i64::MAX) * NANO, |value| value.min(i128::from(i64::MAX) * NANO))
            }
            (magnitude, _) => magnitude.ok_or_else(|| QuantityError::OutOfRange(quoted()))?,
        };
        let nanos = if negative { -magnitude } else { magnitude };
        Ok(Self { nanos, family: scale.family() })
    }
}

fn split_digits(text: &str) -> (&str, &str) {
    let end = text.find(|character: char| !character.is_ascii_digit()).unwrap_or(text.len());
    text.split_at(end)
}

/// What a suffix multiplies with.
#[derive(Debug, Clone, Copy)]
enum Scale {
    /// A power of ten, written as an SI suffix.
    Decimal(i32),
    /// A power of 2¹⁰.
    Binary(u32),
    /// A power of ten, written as an exponent.
    Exponent(i32),
}

const DECIMAL_SUFFIXES: [(&str, i32); 10] =
    [("n", -9), ("u", -6), ("m", -3), ("", 0), ("k", 3), ("M", 6), ("G", 9), ("T", 12), ("P", 15), ("E", 18)];
const BINARY_SUFFIXES: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];

impl Scale {
    fn from_suffix(suffix: &str) -> Option<Self> {
        if let Some((_, power)) = DECIMAL_SUFFIXES.iter().find(|(known, _)| *known == suffix) {
            return Some(Self::Decimal(*power));
        }
        if let Some(power) =
            (1..).zip(&BINARY_SUFFIXES[1..]).find_map(|(i, known)| (*known == suffix).then_some(i))
        {
            return Some(Self::Binary(power));
        }
        // A lone `E` was taken as exa above, as the API server does.
        let exponent = suffix.strip_prefix(['e', 'E'])?;
        exponent.parse::<i32>().ok().map(Self::Exponent)
    }

    fn family(self) -> Family {
        match self {
            Self::Decimal(_) => Family::DecimalSi,
            Self::Binary(_) => Family::BinarySi,
            Self::Exponent(_) => Family::DecimalExponent,
        }
    }

    /// `integer.fraction` times the scale in units of 10⁻⁹, rounded up; absent
    /// where it does not fit.
    fn magnitude(self, integer: &str, fraction: &str) -> Option<i128> {
        let (point, factor) = match self {
            Self::Decimal(power) | Self::Exponent(power) => (power, NANO),
            Self::Binary(power) => (0, NANO << (10 * power)),
        };
        let digits: Vec<i128> =
            integer.bytes().chain(fraction.bytes()).map(|byte| i128::from(byte - b'0')).collect();
        if digits.iter().all(|digit| *digit == 0) {
            return Some(0);
        }
        // Where the decimal point stands among the digits: with an exponent it
        // may be left or right of all of them.
        let limit = i32::try_from(MAX_LENGTH).ok()? + MAX_EXPONENT;
        let point = i32::try_from(integer.len()).ok()?.saturating_add(point).clamp(-limit, limit);
        let digit =
            |position: i32| usize::try_from(position).ok().and_then(|i| digits.get(i)).copied().unwrap_or(0);
        let mut whole: i128 = 0;
        for position in 0..point {
            whole = whole.checked_mul(10)?.checked_add(digit(position))?;
        }
        // The fraction times the factor, from its last digit on: only whole
        // parts are carried, what is cut off can no longer change them.
        let (mut part, mut cut) = (0, false);
        for position in (point..i32::try_from(digits.len()).ok()?.max(point)).rev() {
            let sum = digit(position) * factor + part;
            part = sum / 10;
            cut |= sum % 10 != 0;
        }
        whole.checked_mul(factor)?.checked_add(part)?.checked_add(i128::from(cut))
    }
}

/// The canonical form: the largest suffix that leaves a whole number.
impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.nanos == 0 {
            return f.write_str("0");
        }
        // Below 1Ki, and for fractions, binary suffixes would lose precision.
        let binary = self.family == Family::BinarySi
            && self.nanos % NANO == 0
            && self.nanos.unsigned_abs() >= (1024 * NANO).unsigned_abs();
        if binary {
            let (mut value, mut suffixes) = (self.nanos / NANO, BINARY_SUFFIXES.iter().peekable());
            while let Some(suffix) = suffixes.next() {
                if value % 1024 != 0 || suffixes.peek().is_none() {
                    return write!(f, "{value}{suffix}");
                }
                value /= 1024;
            }
            return Ok(());
        }
        let (mut value, mut exponent) = (self.nanos, -9);
        let last = if self.family == Family::DecimalExponent { i32::MAX } else { 18 };
        while value % 1000 == 0 && exponent < last {
            value /= 1000;
            exponent += 3;
        }
        if self.family == Family::DecimalExponent {
            return if exponent == 0 { write!(f, "{value}") } else { write!(f, "{value}e{exponent}") };
        }
        let suffix =
            DECIMAL_SUFFIXES.iter().find(|(_, power)| *power == exponent).map_or("", |(suffix, _)| suffix);
        write!(f, "{value}{suffix}")
    }
}

impl PartialEq for Quantity {
    fn eq(&self, other: &Self) -> bool {
        self.nanos == other.nanos
    }
}

impl Eq for Quantity {}

impl Hash for Quantity {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.nanos.hash(state);
    }
}

impl PartialOrd for Quantity {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Quantity {
    fn cmp(&self, other: &Self) -> Ordering {
        self.nanos.cmp(&other.nanos)
    }
}

impl From<Quantity> for ApiQuantity {
    fn from(quantity: Quantity) -> Self {
        Self(quantity.to_string())
    }
}

impl TryFrom<&ApiQuantity> for Quantity {
    type Error = QuantityError;

    fn try_from(quantity: &ApiQuantity) -> Result<Self, QuantityError> {
        quantity.0.parse()
    }
}

impl Serialize for Quantity {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// From a text, or from a bare number as the API server takes it.
impl<'de> Deserialize<'de> for Quantity {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Form {
            Text(String),
            Number(serde_json::Number),
        }
        let text = match Form::deserialize(deserializer)? {
            Form::Text(text) => text,
            Form::Number(number) => number.to_string(),
        };
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn quantity(text: &str) -> Quantity {
        text.parse().expect("a quantity")
    }

    #[test]
    fn a_quantity_is_printed_as_the_api_server_prints_it() {
        for (text, canonical) in [
            ("0", "0"),
            ("-0Gi", "0"),
            ("1024Mi", "1Gi"),
            ("1.5Gi", "1536Mi"),
            ("85899345920", "85899345920"),
            ("80Gi", "80Gi"),
            ("1023", "1023"),
            ("0.5Ki", "512"),
            ("0.3Ki", "307200m"),
            ("2048Ei", "9223372036854775807"),
            ("1000", "1k"),
            ("1500m", "1500m"),
            ("0.0000000001", "1n"),
            ("-0.0000000001", "-1n"),
            ("1e3", "1e3"),
            ("12e-1", "1200e-3"),
            ("1E", "1E"),
            ("1Ei", "1Ei"),
            ("1E3", "1e3"),
            ("5.", "5"),
            (".5", "500m"),
            ("+1k", "1k"),
            ("1e-40", "1e-9"),
            ("0e999", "0"),
        ] {
            assert_eq!(quantity(text).to_string(), canonical, "{text}");
        }
    }

    #[test]
    fn what_the_api_server_refuses_is_refused() {
        for text in [
            "", ".", "Ki", "1e3Gi", "1.1.M", "1+1.0M", "0.1mi", "0.1am", "aoeu", ".5i", "1i", "-3.01i",
            "-3.01e-", " 1", "1 ", "1e", "1K", "1 Gi", "--1", "1e1.5", "1Gi1", "0x10", "١",
        ] {
            assert!(matches!(text.parse::<Quantity>(), Err(QuantityError::Malformed(_))), "{text}");
        }
        assert!(matches!("1e40".parse::<Quantity>(), Err(QuantityError::OutOfRange(_))));
        assert!("1".repeat(10_000).parse::<Quantity>().is_err());
    }

    #[test]
    fn values_compare_across_families() {
        assert_eq!(quantity("1Ki"), quantity("1024"));
        assert_eq!(quantity("1k"), quantity("1e3"));
        assert!(quantity("15Gi") > quantity("16G"));
        assert!(quantity("-1") < Quantity::ZERO);
        assert_eq!(
            quantity("1Gi").checked_sub(quantity("1Mi")).map(|left| left.to_string()).as_deref(),
            Some("1023Mi")
        );
        assert_eq!(quantity("1500m").units(), Some(2));
        assert_eq!(quantity("-1").units(), None);
        assert!(quantity("1e29").checked_add(quantity("1e29")).is_none());
    }

    proptest! {
        #[test]
        fn printing_and_reading_gives_the_same_value(
            nanos in any::<i128>(),
            small in any::<u64>(),
            family in prop_oneof![
                Just(Family::DecimalSi),
                Just(Family::BinarySi),
                Just(Family::DecimalExponent)
            ],
        ) {
            for nanos in [nanos, i128::from(small), i128::from(small) * NANO] {
                // Beyond this the API server caps binary quantities.
                let capped = family == Family::BinarySi && nanos.unsigned_abs() > (i128::from(i64::MAX) * NANO).unsigned_abs();
                prop_assume!(!capped && nanos != i128::MIN);
                let value = Quantity { nanos, family };
                let text = value.to_string();
                let read: Quantity = text.parse().expect("its own print");
                prop_assert_eq!(read, value);
                prop_assert_eq!(read.to_string(), text);
            }
        }

        #[test]
        fn no_text_makes_the_reader_panic(text in "[+\\-]?[0-9.]{0,60}[eEinumkKMGTP+\\-0-9]{0,12}") {
            let _ = text.parse::<Quantity>();
        }
    }
}
