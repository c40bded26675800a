"""What parka prepare-images is made of: pictures to pixels, conversations about pictures, and the files with both."""
