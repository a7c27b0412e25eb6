//! Dates as Python's strftime writes them, in UTC and English.

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

struct Date {
    unix: i64,
    micros: u32,
    year: i64,
    month: i64,       // from 1
    day: i64,         // from 1
    day_of_year: i64, // from 0
    weekday: i64,     // from Sunday, 0
    hour: i64,
    minute: i64,
    second: i64,
}

fn is_leap(year: i64) -> bool {
    year % 4 == 0 && (year % 100 != 0 || year % 400 == 0)
}

impl Date {
    fn new(unix: i64, micros: u32) -> Date {
        let (days, second) = (unix.div_euclid(86400), unix.rem_euclid(86400));
        // Days to a date in the proleptic Gregorian calendar, counting years from March.
        let z = days + 719_468;
        let era = z.div_euclid(146_097);
        let of_era = z.rem_euclid(146_097);
        let year_of_era = (of_era - of_era / 1460 + of_era / 36524 - of_era / 146_096) / 365;
        let since_march = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted = (5 * since_march + 2) / 153;
        let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        Date {
            unix,
            micros,
            year,
            month,
            day: since_march - (153 * shifted + 2) / 5 + 1,
            day_of_year: if month > 2 { since_march + 59 + i64::from(is_leap(year)) } else { since_march - 306 },
            weekday: (days + 4).rem_euclid(7),
            hour: second / 3600,
            minute: second / 60 % 60,
            second: second % 60,
        }
    }

    fn hour_of_twelve(&self) -> i64 {
        (self.hour + 11) % 12 + 1
    }

    /// ISO 8601's week, and the year it belongs to: the one with its Thursday.
    fn iso_week(&self) -> (i64, i64) {
        let thursday = self.day_of_year - (self.weekday + 6) % 7 + 3;
        let length = |year| if is_leap(year) { 366 } else { 365 };
        if thursday < 0 {
            (self.year - 1, (thursday + length(self.year - 1)) / 7 + 1)
        } else if thursday >= length(self.year) {
            (self.year + 1, 1)
        } else {
            (self.year, thursday / 7 + 1)
        }
    }

    /// What stands for one letter: text, or a number with its usual width and filling.
    fn part(&self, letter: char) -> Option<Part> {
        let two = |n: i64| Part::Number(n, 2, '0');
        let blank = |n: i64| Part::Number(n, 2, ' ');
        let text = |s: &str| Part::Text(s.to_string());
        let long = |format: &str| Part::Text(self.write(format));
        let (month, day) = (MONTHS[self.month as usize - 1], DAYS[self.weekday as usize]);
        Some(match letter {
            'Y' => Part::Number(self.year, 1, '0'),
            'C' => two(self.year.div_euclid(100)),
            'y' => two(self.year.rem_euclid(100)),
            'G' => Part::Number(self.iso_week().0, 1, '0'),
            'g' => two(self.iso_week().0.rem_euclid(100)),
            'V' => two(self.iso_week().1),
            'U' => two((self.day_of_year + 7 - self.weekday) / 7),
            'W' => two((self.day_of_year + 7 - (self.weekday + 6) % 7) / 7),
            'm' => two(self.month),
            'd' => two(self.day),
            'e' => blank(self.day),
            'j' => Part::Number(self.day_of_year + 1, 3, '0'),
            'B' => text(month),
            'b' | 'h' => text(&month[..3]),
            'A' => text(day),
            'a' => text(&day[..3]),
            'w' => Part::Number(self.weekday, 1, '0'),
            'u' => Part::Number((self.weekday + 6) % 7 + 1, 1, '0'),
            'H' => two(self.hour),
            'k' => blank(self.hour),
            'I' => two(self.hour_of_twelve()),
            'l' => blank(self.hour_of_twelve()),
            'M' => two(self.minute),
            'S' => two(self.second),
            'f' => Part::Number(i64::from(self.micros), 6, '0'),
            's' => Part::Number(self.unix, 1, '0'),
            'p' => text(if self.hour < 12 { "AM" } else { "PM" }),
            'P' => text(if self.hour < 12 { "am" } else { "pm" }),
            'F' => long("%Y-%m-%d"),
            'D' | 'x' => long("%m/%d/%y"),
            'T' | 'X' => long("%H:%M:%S"),
            'R' => long("%H:%M"),
            'r' => long("%I:%M:%S %p"),
            'c' => long("%a %b %e %H:%M:%S %Y"),
            'Z' => text("UTC"),
            'z' => text("+0000"),
            'n' => text("\n"),
            't' => text("\t"),
            '%' => text("%"),
            _ => return None,
        })
    }

    fn write(&self, format: &str) -> String {
        let mut out = String::new();
        let mut rest = format.chars();
        while let Some(c) = rest.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            // glibc's flags before the letter: "-" without filling, "_" and "0" with another, "^" in capitals.
            let mut ahead = rest.clone();
            let flag = ahead.next().filter(|c| "-_0^".contains(*c));
            let letter = if flag.is_some() { ahead.next() } else { rest.clone().next() };
            let Some(part) = letter.and_then(|l| self.part(l)) else {
                out.push('%'); // not one of them: it stays as it is
                continue;
            };
            rest.nth(usize::from(flag.is_some()));
            match (part, flag) {
                (Part::Text(s), Some('^')) => out += &s.to_uppercase(),
                (Part::Text(s), _) => out += &s,
                (Part::Number(n, _, _), Some('-')) => out += &n.to_string(),
                (Part::Number(n, width, fill), flag) => {
                    let fill = match flag {
                        Some('_') => ' ',
                        Some('0') => '0',
                        _ => fill,
                    };
                    let digits = n.to_string();
                    (digits.len()..width).for_each(|_| out.push(fill));
                    out += &digits;
                }
            }
        }
        out
    }
}

enum Part {
    Text(String),
    Number(i64, usize, char),
}

pub fn strftime(format: &str, unix: i64, micros: u32) -> String {
    Date::new(unix, micros).write(format)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(format: &str, unix: i64) -> String {
        strftime(format, unix, 42)
    }

    #[test]
    fn dates_are_right() {
        assert_eq!(at("%d %b %Y", 0), "01 Jan 1970");
        assert_eq!(at("%A %Y-%m-%d %H:%M:%S", 1_709_210_096), "Thursday 2024-02-29 12:34:56");
        assert_eq!(at("%F", -86_400), "1969-12-31");
    }

    // What Python 3.11 with glibc in the C locale says of them.
    #[test]
    fn letters_are_pythons() {
        const ALL: &str =
            "%a %A %b %B %c %C %d %D %e %f %F %g %G %h %H %I %j %k %l %m %M %p %P %r %R %s %S %T %u %U %V \
                           %w %W %x %X %y %Y %z %Z %% %n%t";
        const EXPECTED: &[(i64, &str)] = &[
            (1704445384, "Fri Friday Jan January Fri Jan  5 09:03:04 2024 20 05 01/05/24  5 000042 2024-01-05 24 2024 Jan 09 09 005  9  9 01 03 AM am 09:03:04 AM 09:03 1704445384 04 09:03:04 5 00 01 5 01 01/05/24 09:03:04 24 2024 +0000 UTC % \n\t"),
            (1735603200, "Tue Tuesday Dec December Tue Dec 31 00:00:00 2024 20 31 12/31/24 31 000042 2024-12-31 25 2025 Dec 00 12 366  0 12 12 00 AM am 12:00:00 AM 00:00 1735603200 00 00:00:00 2 52 01 2 53 12/31/24 00:00:00 24 2024 +0000 UTC % \n\t"),
            (1609459199, "Thu Thursday Dec December Thu Dec 31 23:59:59 2020 20 31 12/31/20 31 000042 2020-12-31 20 2020 Dec 23 11 366 23 11 12 59 PM pm 11:59:59 PM 23:59 1609459199 59 23:59:59 4 52 53 4 52 12/31/20 23:59:59 20 2020 +0000 UTC % \n\t"),
            (1230768000, "Thu Thursday Jan January Thu Jan  1 00:00:00 2009 20 01 01/01/09  1 000042 2009-01-01 09 2009 Jan 00 12 001  0 12 01 00 AM am 12:00:00 AM 00:00 1230768000 00 00:00:00 4 00 01 4 00 01/01/09 00:00:00 09 2009 +0000 UTC % \n\t"),
            (951825600, "Tue Tuesday Feb February Tue Feb 29 12:00:00 2000 20 29 02/29/00 29 000042 2000-02-29 00 2000 Feb 12 12 060 12 12 02 00 PM pm 12:00:00 PM 12:00 951825600 00 12:00:00 2 09 09 2 09 02/29/00 12:00:00 00 2000 +0000 UTC % \n\t"),
            (1483228799, "Sat Saturday Dec December Sat Dec 31 23:59:59 2016 20 31 12/31/16 31 000042 2016-12-31 16 2016 Dec 23 11 366 23 11 12 59 PM pm 11:59:59 PM 23:59 1483228799 59 23:59:59 6 52 52 6 52 12/31/16 23:59:59 16 2016 +0000 UTC % \n\t"),
            (1262304000, "Fri Friday Jan January Fri Jan  1 00:00:00 2010 20 01 01/01/10  1 000042 2010-01-01 09 2009 Jan 00 12 001  0 12 01 00 AM am 12:00:00 AM 00:00 1262304000 00 00:00:00 5 00 53 5 00 01/01/10 00:00:00 10 2010 +0000 UTC % \n\t"),
        ];
        for (unix, text) in EXPECTED {
            assert_eq!(&at(ALL, *unix), text);
        }
        assert_eq!(at("%-d %_d %0e %-I:%M %^a %-j", 1_704_445_384), "5  5 05 9:03 FRI 5");
        assert_eq!(at("%Q %-Q 100% %", 0), "%Q %-Q 100% %");
    }
}
